"""Passes that users write: a JAX function as the example, an op or a function as the replacement. Read `own_pass`, then `own_site`;
`written_pass` takes a pass that is any object with the attributes of one; `reserved_names` keeps a name from meaning two things.
"""
