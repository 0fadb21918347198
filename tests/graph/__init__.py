"""Tests of `fusionlab/graph`, a folder for each of its own; `every_primitive.py` has a program for each primitive of JAX."""
