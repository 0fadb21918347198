"""The primitives of JAX by family: the one table from which all sets of primitive names in this package are made.

A set that deviates from a family documents that at its definition. Names used only before JAX 0.10 (`psum2`, `custom_vjp_call_jaxpr`)
are not included.
"""

from __future__ import annotations

# family -> names
_TABLE = {
    # -- entry by entry --
    "addition": "add add_any",  # add_any is the sum of cotangents
    "difference": "sub",
    "scaling": "mul div neg",
    "power": "pow integer_pow square",
    "root": "sqrt rsqrt",
    "extreme": "max min",
    "equality": "eq ne",
    "order": "gt ge lt le",
    "logic": "not and or xor",
    "choice": "select_n clamp",
    "magnitude": "abs sign",
    "rounding": "floor ceil round rem",
    "exponential": "exp exp2 expm1",
    "logarithm": "log log1p",
    "trigonometric": "sin cos tan asin acos atan",
    "hyperbolic": "sinh cosh asinh acosh atanh",
    "sigmoid": "tanh logistic erf erfc",
    "inverse error": "erf_inv",
    "cube root": "cbrt",
    "finite": "is_finite",
    "cast": "convert_element_type",
    # -- the same entries --
    "shape": "reshape squeeze expand_dims",
    "layout": "reshape squeeze expand_dims broadcast_in_dim transpose",
    "copy": "copy copy_p",
    "variance": "pvary",  # says along which mesh axes a value varies
    "placement": "reshard sharding_constraint",
    "mark": "stop_gradient name optimization_barrier",
    "precision": "reduce_precision",
    "slice": "slice dynamic_slice",
    "part": "slice dynamic_slice split unstack gather",
    # -- several entries --
    "product": "dot_general conv_general_dilated",
    "ragged product": "ragged_dot ragged_dot_general",
    "reduction": "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin",
    "row reduction": "reduce_sum reduce_max reduce_min",
    # -- other programs --
    "jit": "jit pjit",
    "call": "jit pjit closed_call core_call",
    "remat": "remat2 remat checkpoint",
    "rule": "custom_jvp_call custom_vjp_call",
    "branch": "cond",
    "loop": "scan while",
    "mesh": "shard_map",
    # -- several devices --
    "device sum": "psum psum_invariant reduce_scatter",
    "device extreme": "pmax pmin",
    "exchange": "all_gather all_gather_invariant all_to_all ppermute pbroadcast",
}
FAMILIES = {family: frozenset(names.split()) for family, names in _TABLE.items()}


def having(*families: str) -> frozenset[str]:
    """The primitives of some families.

    Raises:
      KeyError: there is no family of that name.
    """
    return frozenset().union(*(FAMILIES[family] for family in families))


def families_of(name: str) -> tuple[str, ...]:
    """The families that a primitive is of, in the table's order."""
    return tuple(family for family, names in FAMILIES.items() if name in names)


# The canonical view's own nodes: what stays an op of one operand or two there, where sums, products and powers become nodes of others.
UNARY = having(
    "exponential",
    "logarithm",
    "sigmoid",
    "inverse error",
    "trigonometric",
    "hyperbolic",
    "magnitude",
    "cube root",
    "finite",
) | frozenset("not floor ceil one_minus_square population_count".split())
BINARY = (
    having("extreme", "equality")
    | frozenset(
        "gt ge and or xor rem atan2 pow nextafter shift_left shift_right_logical".split()  # lt and le are gt and ge turned round
    )
)
COMMUTATIVE = having("extreme", "equality") | frozenset("and or xor iadd imul".split())
CANONICAL_ELEMENTWISE = UNARY | BINARY
SUMS_OVER_DEVICES = having("device sum")
