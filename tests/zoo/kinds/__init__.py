"""Models by kind of site, written out: attentions, norms, layers over devices, structures, controls that hold no site."""
