"""Time by scope, and the trace of a run."""
