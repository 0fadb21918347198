"""The numpy interpreter, on one device and on several."""
