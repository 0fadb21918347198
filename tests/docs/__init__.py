"""Tests of the documentation: its generated pages."""
