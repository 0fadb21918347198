"""The primitives that work entry by entry, as the canonical view names them."""

UNARY = frozenset(
    "tanh exp exp2 expm1 log log1p erf erfc erf_inv logistic abs sign not is_finite sin cos tan floor ceil cbrt sinh cosh "
    "asinh acosh atanh asin acos atan one_minus_square population_count".split()
)
BINARY = frozenset("max min eq ne gt ge and or xor rem atan2 pow nextafter shift_left shift_right_logical".split())
COMMUTATIVE = frozenset("max min eq ne and or xor iadd imul".split())
ELEMENTWISE = UNARY | BINARY
