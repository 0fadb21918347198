"""Pass `lerp`: x + w * (y - x). Read `lerp` first, then `blends` (what makes it) and `examples` (the spellings)."""
