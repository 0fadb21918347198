"""The raw graph: every equation of a traced program with its value's type, its source line and its scope.

Read `ir` (the data), `trace` (from a function to it) and `text` (how it is shown) first; `scopes` says whose line an equation is
of. `signature` and `identical` tell whether two parts compute the same thing. `boundary` is where a fault of a search becomes a
rejection. The others are about values on meshes (`meshes`, `explicit_axes`, `in_shard_map`), symbolic sizes, captured arrays, and
the writing of equations anew (`equations`, `order`, `crossing`).
"""
