"""Tests of the benchmarks themselves: that they run, and that their records say what they should."""
