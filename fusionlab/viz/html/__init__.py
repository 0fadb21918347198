"""HTML, every text of a program escaped. `report` is the one page; `page` and `baked` the standalone explorer; `inspector`,
`inspector_rows`, `inspector_sites`, `kernel_sources`, `tabs`, `sections`, `shares`, `blame` and `diff` are the panes that both show.
"""
