"""The raw graph: every equation of a traced program with its value's type, its source line and its scope.

Read `ir` (the data), `trace` (from a function to a graph) and `text` (the text form) first; `scopes` finds the source line of an
equation. `signature` and `identical` decide whether two parts compute the same thing. `boundary` turns a failure of a search into a
rejection. The others are about values on meshes (`meshes`, `explicit_axes`, `in_shard_map`), symbolic sizes, captured arrays, and
rewriting equations (`equations`, `order`, `crossing`).
"""
