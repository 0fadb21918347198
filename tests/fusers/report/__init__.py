"""Structures: what sites are parts of."""
