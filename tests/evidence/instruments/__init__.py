"""Tests of `fusionlab/evidence/instruments`: what one program takes."""
