"""Tests of the rules of `fusionlab.fusers.lints`: what is a lint, and what is none."""
