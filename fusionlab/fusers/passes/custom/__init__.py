"""Passes that users write: a JAX function as the example, an op or a function as the replacement. Read `own_pass`, then `own_site`;
`reserved_names` keeps a name from meaning two things.
"""
