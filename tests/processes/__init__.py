"""Several processes, as on several hosts."""
