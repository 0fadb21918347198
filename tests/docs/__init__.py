"""The documents' code, run as a reader would run it."""
