"""The steps that every pass takes at a place in a program.

Read `base` first (what a pass is), then `site` (matching and checking one place), `proposing` (certifying it), `outcomes` (candidates and
rejections) and `layout` (from axes to the op's operands). A place that is not a site raises `Declined`, which `declining` catches;
`declining` and `nearly` write the sentences of rejections, and `wording` names the nodes in them. `grouping` groups similar sites, `unfit`
declines regions that no fused op can replace. `pairs` and `pairing` join forward sites with their backward passes; `overlaps` decides
between overlapping sites. `passages`, `other_numbers` and `fully_masked_rows` hold facts that several passes need.
"""
