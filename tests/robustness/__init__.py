"""Interrupts, damaged caches, memory that runs out, HTML of a hostile model, files that must run nothing."""
