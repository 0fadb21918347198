"""Parts of the command line: `demo`, `doctor`, and `loading` (a function and its arguments from text)."""
