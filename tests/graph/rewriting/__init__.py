"""Programs with sites replaced."""
