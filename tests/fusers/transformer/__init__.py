"""Whole layers: `layer_models` and `layer_parts` build them, `layer_variants` and `layer_rotary` spell them otherwise, `*_misses` are
none.
"""
