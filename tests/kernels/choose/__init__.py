"""Which implementation a call takes."""
