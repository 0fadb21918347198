"""Tests of `fusionlab.evidence.advice`: what is advised, and what is not."""
