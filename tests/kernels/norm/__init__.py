"""`layer_norm` and `group_norm`."""
