"""The kernels for one token a text over caches. Read `backend` first (which calls they take), then `phased/` (five kernels a layer)
and `persistent/` (all layers in one kernel). The headers here are what both include.
"""
