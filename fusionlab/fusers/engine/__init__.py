"""What every pass does with a place in a program.

Read `base` first (what a pass is), then `site` (one place: matched and checked), `proposing` (proved; a candidate or a rejection),
`outcomes` (those two) and `layout` (from axes to the op's operands). Where a place is none, `Declined` is raised, and `declining`
catches it; it and `nearly` write the sentences of rejections, with nodes as `wording` names them. `grouping` puts alike sites together,
`unfit` is what no fused op can stand for. `pairs` and `pairing` join forward sites and backward passes, `overlaps` decides between
sites. `passages`, `other_numbers` and `fully_masked_rows` are facts that several passes ask for.
"""
