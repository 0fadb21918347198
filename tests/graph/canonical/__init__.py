"""The canonical view: equal for what means the same, different for what does not."""
