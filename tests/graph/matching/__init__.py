"""Patterns, matches, and the nearest miss."""
