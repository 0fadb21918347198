"""The fused ops: the meaning of each, and every way to run it on a device.

    launch/   from a plan of launches to kernels on XLA's stream: every kernel of ours is launched in `launch/ffi_call.py`.
    choose/   which way a call takes: what was measured for it, or a rule.
    op/       the op protocol: one op is three primitives with a meaning in plain `jax.numpy` and any number of implementations.
    sources   every CUDA source with its variants, and which of them a GPU runs.
    ops/      the ops, a folder each: `reference.py` is the meaning, `op.py` the call, a module for each implementation, and `card.py`
              what lists of all ops show of it.

May import `graph`; of the ops, one may use another's kernels where its module's docstring names it.
"""

import sys
from importlib import import_module

from .launch.compile import KERNELS
from .op.card import Card as Card
from .op.implementation import BackendVerdict as BackendVerdict
from .op.implementation import Residual as Residual
from .op.op import Op as Op
from .op.op import meaning_of as meaning_of
from .op.op import plain_meaning_of as plain_meaning_of

# In the order of their field: an op is here by having a card in its folder.
CARDS: tuple[Card, ...] = tuple(
    sorted(
        (import_module(f".ops.{path.parent.name}.card", __name__).CARD for path in KERNELS.glob("*/card.py")),
        key=lambda card: card.order,
    )
)
OPS: dict[str, Op] = {card.op.name: card.op for card in CARDS}

# The name of a module that saved notebooks import, from before the ops had a folder of their own.
sys.modules.update({f"{__name__}.{old}": sys.modules[f"{__name__}.ops.{old}"] for old in ("lerp", "lerp.plan")})
