"""The kernels for one token per text over caches. Read `backend` first (which calls they take), then `phased/` (five kernels per
layer) and `persistent/` (all layers in one kernel). Both include the headers here.
"""
