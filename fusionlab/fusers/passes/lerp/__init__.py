"""Pass `lerp`: x + w * (y - x). Read `lerp` first, then `blends` (the nodes of a blend) and `examples` (the spellings)."""
