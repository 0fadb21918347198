"""How far the timing can be trusted: programs that differ by a known share."""
