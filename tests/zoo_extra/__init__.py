"""The extra zoo: models that other people's libraries build, which nothing here was written for.

`catalogue` lists them with their sizes and the truth about each, counted from how the library is written; `pins` names the
release of each library. The list was committed before the search saw any of them, and no model is exchanged for another.
No file of this package imports FusionLab, but the tests that search.
"""
