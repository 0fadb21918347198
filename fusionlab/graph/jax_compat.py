"""The differences between jax 0.10, 0.11 and 0.12, in one file.

0.10 has `Jaxpr` (open, constants as variables) and `ClosedJaxpr`; from 0.11 they are one class. `jax.extend.core.ClosedJaxpr`
exists in all three and constructs the right thing; never test with isinstance, only by attributes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

# Calls that mean nothing by themselves. Everything else that owns a jaxpr stays a node with child blocks.
FLATTENED = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") and hasattr(x, "outvars")


def split_closed(x: Any) -> tuple[Any, Sequence[Any]]:
    """An open or closed jaxpr -> (jaxpr with invars/constvars/eqns, its constants)."""
    consts = getattr(x, "consts", ())
    return (x.jaxpr if hasattr(x, "jaxpr") else x), tuple(consts)


def variables_in(atoms: Iterable[Any]) -> list:
    """Those atoms of a jaxpr that are variables, in order, each as often as it occurs."""
    return [a for a in atoms if not isinstance(a, jex_core.Literal)]


def variables_read(eqns: Iterable[Any], outvars: Iterable[Any]) -> list:
    """The variables that equations read, and that are among their results, each as often as it occurs."""
    return [v for eqn in eqns for v in variables_in(eqn.invars)] + variables_in(outvars)


def variable_like(var: Any) -> Any:
    """A new variable of the same type. The binder of a mutable object (hijax) holds more: its state before and after."""
    state = {name: found for name in ("initial_qdd", "final_qdd") if (found := getattr(var, name, None)) is not None}
    return jex_core.Var(var.aval, **state)


def rebuild(template: Any, constvars: list, invars: list, outvars: list, eqns: list, consts: list) -> Any:
    """A jaxpr of the same kind (open or closed) as `template`, with its debug info and effects."""
    base, _ = split_closed(template)
    # High is what holds objects of the user's (nnx's variables, say), which JAX turns into arrays before it lowers anything.
    names = (base.debug_info.arg_names, len(invars)), (base.debug_info.result_paths, len(outvars))
    arguments, results = (
        names_known if names_known is not None and len(names_known) == count else None for names_known, count in names
    )
    debug_info = base.debug_info._replace(arg_names=arguments, result_paths=results)
    effects = effects_inside(base.effects, [*constvars, *invars], eqns)
    new = jex_core.Jaxpr(constvars, invars, outvars, eqns, effects, debug_info, base.is_high)
    if not hasattr(template, "consts"):  # an open jaxpr of jax 0.10
        if constvars:
            raise AssertionError("an open jaxpr cannot carry constants")
        return new
    return jex_core.ClosedJaxpr(new, consts)


def _of_variable(effect: Any) -> bool:
    """Whether an effect is one on a mutable array, named by its variable; before it was, by its position."""
    return isinstance(getattr(effect, "input", None), jex_core.Var)


def effects_inside(effects: Iterable[Any], binders: Iterable[Any], eqns: Iterable[Any]) -> set[Any]:
    """The effects of a jaxpr with these inputs and equations, in place of one with those effects."""
    given = set(binders)
    found = (e for eqn in eqns for e in eqn.effects if _of_variable(e) and e.input in given)
    return {e for e in effects if not _of_variable(e)} | set(found)


def on_inputs(eqn: Any, invars: Sequence[Any]) -> Any:
    """The equation with other inputs, which its effects on mutable arrays are then on."""
    now = {v: new for v, new in zip(eqn.invars, invars, strict=False) if isinstance(v, jex_core.Var)}
    effects = {e.replace(now.get(e.input, e.input)) if _of_variable(e) else e for e in eqn.effects}
    return eqn.replace(invars=list(invars), effects=effects)


def _is_program(x: Any) -> bool:
    """Whether something is a jaxpr, open or closed."""
    return is_jaxpr(x) or (hasattr(x, "jaxpr") and is_jaxpr(x.jaxpr))


def child_jaxprs(eqn: Any) -> Iterator[tuple[str, int | None, Any]]:
    """The jaxprs in an equation's params: (param name, index within a tuple or None, jaxpr)."""
    for key, val in eqn.params.items():
        if getattr(val, "is_annotation", False):  # a jaxpr there is for JAX's eyes alone, and runs nothing
            continue
        if _is_program(val):
            yield key, None, val
        elif isinstance(val, tuple | list):
            for i, item in enumerate(val):
                if _is_program(item):
                    yield key, i, item


def types_in(closed: Any) -> Iterator[Any]:
    """The types of all values of a jaxpr, those inside its equations included."""
    jaxpr, _ = split_closed(closed)
    yield from (v.aval for v in (*jaxpr.constvars, *jaxpr.invars))
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for _, _, child in child_jaxprs(eqn):
            yield from types_in(child)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(_leaves(consts)), len(_leaves(carry))


@functools.lru_cache(maxsize=256)
def _scan_trees(consts: int, carry: int, xs: int, ys: int) -> dict[str, Any]:
    def run(const: list, first: list, entries: list) -> Any:
        def body(c: list, x: list) -> tuple[list, list]:
            total = sum([*const, *c, *x], jax.numpy.zeros((), "float32"))
            return [v + total for v in c], [total * jax.numpy.float32(i + 2) for i in range(ys)]

        return jax.lax.scan(body, first, entries, length=2)

    given = [[jax.ShapeDtypeStruct(shape, "float32")] * n for n, shape in ((consts, ()), (carry, ()), (xs, (2,)))]
    with jax.disable_jit(False):  # a scan that is run step by step has no equation
        jaxpr, _ = split_closed(jax.make_jaxpr(run)(*given))
    params = next(eqn.params for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return {k: params[k] for k in ("ft_in", "ft_out") if k in params}


def scan_trees(consts: int, carry: int, xs: int, ys: int) -> dict[str, Any]:
    """The parameters by which a scan separates its constants, carries, entries and per-step results, where they are trees.

    They are read off a scan with equal numbers of each, because JAX does not document how it builds these trees.
    """
    return dict(_scan_trees(consts, carry, xs, ys))


def scan_numbers(params: dict[str, Any], consts: int, carry: int, xs: int, ys: int) -> dict[str, Any]:
    """Those parameters of a scan equation that say how many constants, carries, entries and per-step results it has."""
    numbers = {"num_consts": consts, "num_carry": carry, "linear": (False,) * (consts + carry + xs)}
    return {k: v for k, v in (numbers | scan_trees(consts, carry, xs, ys)).items() if k in params}


@functools.lru_cache(maxsize=1)
def unspecified_sharding() -> Any:
    """The value of `out_shardings` in a jit equation if the user gave none."""
    with jax.disable_jit(False):
        jaxpr, _ = split_closed(jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0))
    return jaxpr.eqns[0].params["out_shardings"][0]


def has_side_effects(eqn: Any) -> bool:
    """Whether an equation has side effects; JAX also records the name of a mesh axis as an effect, which does not count."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def names_an_axis(eqn: Any) -> bool:
    """Whether an equation names a mesh axis and so has no meaning outside a shard_map: a collective, or an axis index."""
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in eqn.effects)


def with_weakness(x: Any, weak: bool) -> Any:
    """`x` in its own dtype, weakly typed or not. `jax.lax.convert_element_type` cannot make a value weak."""
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)


def without_dead_code(closed: Any) -> Any:
    """A closed jaxpr without unread values, also inside scans, shard_maps and other regions and across them; inputs stay."""
    jaxpr, consts = split_closed(closed)
    new, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return rebuild(closed, list(new.constvars), list(new.invars), list(new.outvars), list(new.eqns), list(consts))


def _leaves(tree: Any) -> list:
    vals = getattr(tree, "vals", None)
    return list(vals) if vals is not None else jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes along which a value inside a shard_map with check_vma is typed as differing; none elsewhere."""
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def varies(aval: Any) -> bool:
    """Whether a value inside a shard_map with check_vma is typed as differing along a mesh axis."""
    return bool(varying_axes(aval))


def has_pending_sums(aval: Any) -> bool:
    """Whether a sum over a mesh axis is still owed to a value inside a shard_map, or to its gradient (unreduced, reduced)."""
    kind = getattr(aval, "manual_axis_type", None)
    return bool(getattr(kind, "unreduced", ())) or bool(getattr(kind, "reduced", ()))


class _Raised(contextlib.AbstractContextManager):
    """A context around a call that raises; it keeps the type of the error."""

    kind: Any = None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self.kind = kind
        return kind is not None and issubclass(kind, Exception)


def sharding_type_error(ambiguous: Callable[[], None]) -> type[Exception]:
    """The error for types with incompatible shardings. JAX has no public name for it, so it is taken from a call that raises it."""
    with _Raised() as raised:
        ambiguous()
    return raised.kind or ValueError


def enable_x64(on: bool = True) -> Any:
    """A context manager that switches 64-bit types on without touching the user's config."""
    return jax.enable_x64(on)


def on_default_device(x: Any) -> bool:
    """Whether it is an array that lies whole on the device where new arrays are made."""
    if not isinstance(x, jax.Array):
        return False
    with jax.transfer_guard("allow"):
        return x.sharding == jax.numpy.zeros(()).sharding


def rule_functions(rule: Any) -> tuple[types.FunctionType, ...]:
    """The functions that make up a custom_jvp_call's rule (its `jvp_jaxpr_fun`), found through the closures of JAX's wrappers."""
    seen: set[int] = set()
    found: list[types.FunctionType] = []
    stack = [rule]
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            found.append(x)
        stack.extend(_wrapped_by(x))
    return tuple(found)


def _wrapped_by(x: Any) -> Sequence[Any]:
    """The functions held by a function or by JAX's wrapper of it."""
    if isinstance(x, types.FunctionType):
        return [c.cell_contents for c in x.__closure__ or () if _is_filled(c)]
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, types.MethodType):
        return (x.__func__,)
    if isinstance(x, tuple | list):
        return x
    # JAX's WrappedFun keeps the function before and after its transformations.
    return (x.f, getattr(x, "f_transformed", None)) if hasattr(x, "call_wrapped") else ()


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def draws_by_entry(eqn: Any) -> bool:
    """Whether random bits depend only on the key and an entry's number (`jax_threefry_partitionable`), as set when they were traced."""
    return bool(eqn.ctx.threefry_partitionable)


@functools.cache
def threefry_key() -> Any:
    """The dtype of a key of JAX's default generator."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


# Of `jax.jit`: what it was given, which it keeps in an attribute that is not public but the same from jax 0.10 to 0.12.
_JIT_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


def jit_options(fn: Any) -> dict[str, Any] | None:
    """The options of a function under `jax.jit`, as its keyword arguments; None for any other function."""
    info = getattr(fn, "_jit_info", None)
    if info is None or not isinstance(fn, type(jax.jit(_nothing))):
        return None
    options: dict[str, Any] = {name: getattr(info, name) for name in _JIT_OPTIONS}
    options |= {name: True for name in ("keep_unused",) if getattr(info, name)}
    if getattr(info.inline, "value", info.inline) not in (False, "auto", None):
        options["inline"] = info.inline
    options |= {name: value for name in ("device", "backend") if (value := getattr(info, name)) is not None}
    if info.compiler_options_kvs:
        options["compiler_options"] = dict(info.compiler_options_kvs)
    return options | _all_placements(info)


def _nothing() -> None:
    """A function to find the class that `jax.jit` returns."""


def _all_placements(info: Any) -> dict[str, Any]:
    """`in_shardings` and `out_shardings`, as far as given."""
    found = {f"{side}_shardings": _placements(info, side) for side in ("in", "out")}
    return {name: placed for name, placed in found.items() if placed is not None}


def _placements(info: Any, side: str) -> Any:
    """`in_shardings` or `out_shardings` as given; None if they were not."""
    leaves, layouts = getattr(info, f"{side}_shardings_leaves"), getattr(info, f"{side}_layouts_leaves")
    if all("Unspecified" in type(s).__name__ for s in leaves) and not any(layouts):
        return None
    given = [None if "Unspecified" in type(s).__name__ else s for s in leaves]
    given = [s if layout is None else Format(layout, s) for s, layout in zip(given, layouts, strict=True)]
    return jax.tree.unflatten(getattr(info, f"{side}_shardings_treedef"), given)


def pallas_load(ref: Any, layout: Any) -> Any:
    """The value of a reference in a Mosaic GPU kernel, in this layout over the threads; newer versions of JAX take no index."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    needs_index = inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty
    return plgpu.load(ref, **({"idx": ()} if needs_index else {}), layout=layout, optimized=False)
