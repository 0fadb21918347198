"""The choice of a call's implementation: by `fl.tune`'s measurements, a shipped table, or the op's own rule. `choices` reads all
three."""
