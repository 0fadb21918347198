"""Tests of `fusionlab/evidence`: timing, memory, errors, and which site is behind a difference."""
