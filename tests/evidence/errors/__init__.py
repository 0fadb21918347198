"""Tests of `fusionlab/evidence/errors`."""
