"""Backward passes, found by value."""
