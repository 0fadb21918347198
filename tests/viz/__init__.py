"""Tests of `fusionlab/viz`, a folder for each of its own."""
