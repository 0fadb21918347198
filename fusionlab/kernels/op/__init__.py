"""The op protocol: the parts of every fused op.

Read `op` first (an op, its three primitives and its implementations), then `description` (an op's description of itself), `implementation`
(that of one implementation), `chooser` (which one runs), `primitive`, `lowering` (several devices) and `labels` (axes by name, from which
batching and splitting follow).
`arrays` takes operands in. `composite` and `own` are ops made of other ops, and ops of users' own. Lists of all ops are made from
the `card`s.
"""
