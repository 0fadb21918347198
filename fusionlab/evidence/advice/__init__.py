"""Lints tried: `tried` makes the edit of each, and measures it."""
