"""Tracing, text, and which parts are the same."""
