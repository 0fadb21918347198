"""How far evidence can be trusted: times of programs that differ by a known share, and errors of train steps that are right."""
