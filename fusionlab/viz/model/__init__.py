"""The content of a picture, as plain data. Read `view_model` first, then `groups`, `folding` and `opening` (how they are made and
opened), `sites` (which, where, in which state), `flow` (edges) and `pictures` (made once and kept). `setting` has the enabled
sites, `panel` the explorer's left side, `node_data`, `search` and `selection` answer requests, `summaries` and `evidence_view` its
header, `alike` which sites are grouped together.
"""
