"""Tests of `linear_cross_entropy`."""
