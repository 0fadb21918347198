"""Backward passes. In an already differentiated program, each region's own backward pass is found and replaced with it.

Read `find` first (by value: which later values are the gradients of a region), then `pair` (both as one replacement) and
`gradients` (its operands and the places of its results). `vjp_split` makes the two programs of a function's derivative; `joined_blocks`
joins a scan and its backward scan.
"""
