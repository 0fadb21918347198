"""Which implementation a call takes: what `fl.tune` measured for it, a shipped table, or the op's own rule. `choices` reads all three."""
