"""Passes that users write."""
