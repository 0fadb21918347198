"""Everything visual: pictures, plots, the explorer and the report. No lower layer imports it.

palette.py, markup.py   colours; pieces of escaped HTML.
model/                  all that a picture shows, as plain data: no drawing.
parts/                  how a program falls into parts that have names.
cards/                  the picture: those parts as cards in lanes and rows, placed and drawn.
export.py, convert.py   the picture as SVG, DOT and plain data; as PNG and PDF.
notebook.py             what a cell shows, so that it is still there when the notebook comes back.
plots.py, roofline_plots.py, route_plots.py, gpu_record.py   matplotlib's figures.
html/                   the report and the panes that the explorer shares with it.
explorer/               the widget, its session, and what it is saved as.
browser.py, assets/      scripts and styles of the browser.
"""
