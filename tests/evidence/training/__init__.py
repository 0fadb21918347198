"""Tests of `fusionlab/evidence/training`: steps, bands and loss curves."""
