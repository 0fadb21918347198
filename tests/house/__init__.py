"""Tests of the repository: what imports what, the tiers and durations of tests, README and notebooks as they are written, no broad
except.
"""
