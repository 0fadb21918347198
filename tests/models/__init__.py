"""Tests of the models that ship, plain and fused."""
