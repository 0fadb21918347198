"""How far evidence can be trusted: times of programs that differ by a known share, and errors of train steps that are right;
where the time of a step goes (`parts`, `time_by_scope`), and that of the first one (`first_step`)."""
