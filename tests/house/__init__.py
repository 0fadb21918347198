"""Tests of the repository: what imports what, the tiers and durations of tests, notebooks as they are written, no broad
except.
"""
