"""The proof of a match, and what must not pass it."""
