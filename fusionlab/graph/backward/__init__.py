"""Backward passes. In a program that is differentiated already, each region's own backward pass is found and replaced with it.

Read `find` first (by value: which later values are the gradients of a region), then `pair` (both as one replacement) and
`gradients` (what it reads and where it goes). `vjp_split` makes the two programs of a function's derivative; `joined_blocks` joins
a scan and the scan back.
"""
