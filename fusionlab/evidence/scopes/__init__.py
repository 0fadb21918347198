"""Time by module and named scope (`scope_times`), and as a trace for Perfetto (`trace_events`)."""
