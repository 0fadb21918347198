"""Tests of the passes of losses."""
