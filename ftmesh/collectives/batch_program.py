"""A traced program of the whole batch as a program of one rank with its share of the examples.

`partition` goes through the equations of a program once, with the layout of each input, and finds
the layout of every other array and what a rank runs instead of each equation. Sums over examples
become sums over ranks where their value is used, and stay parts of a sum as long as what follows
is linear. An equation that needs examples of other ranks is rejected with its source line.

Weights that are sharded along the axis are gathered by the equation that computes with them, inside
a loop over layers too, and the sums of their gradients are scattered where they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from numpy.typing import NDArray

from ftmesh.collectives.batch_layout import PARTIAL, SAME, BatchLayout, RankUnits, Spread
from ftmesh.execute import _compat

Layouts = tuple[BatchLayout, ...]

# Say where arrays are, which layouts say for the axis of the plan.
PLACEMENTS = ("sharding_constraint", "reshard", "mesh_cast", "device_put")
SUMS = ("psum", "psum_invariant")  # over mesh axes, in a shard_map

# Calls of a program, which run in place.
CALLS = (
    "jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "composite", "eval_jaxpr",
)  # fmt: skip

# Their rules take shards; all others take whole arrays.
TAKES_SHARDS = {
    *PLACEMENTS, *CALLS, "convert_element_type", "copy", "copy_p", "name", "neg",
    "optimization_barrier", "scan", "squeeze", "transpose",
}  # fmt: skip

# Their rules hold also where all operands are the same on all ranks.
SPECIAL = (*PLACEMENTS, *SUMS, "pvary", "all_gather_invariant", "rng_uniform")


class MixedExamplesError(Exception):
    """An operation needs examples of other ranks, or what it needs is not known."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.places: list[tuple[str, Any]] = []  # operation and source lines, innermost first

    def describe(self) -> str:
        """The operation and its line, such as ``sort at train.py:12``."""
        operation, lines = self.places[0]
        for _, outer in self.places[1:]:
            is_stale = outer and outer[0] not in lines and not _compat.LINES_END_AT_JIT
            lines = outer if is_stale or not lines else lines
        where = "an unknown line"
        if lines:
            file, line = lines[0]
            where = f"{Path(file).name}:{line}"
        return f"{operation!r} at {where} {self.reason}"


class ResplitError(MixedExamplesError):
    """Examples must be shared among ranks in another way: one of `splits`, relative to units."""

    def __init__(self, reason: str, minor: int) -> None:
        super().__init__(reason)
        self.minor = minor


@dataclass(frozen=True)
class Fact:
    """What is known of an array of integers before the program runs."""

    value: NDArray[Any] | None = None  # all of it, on whole batches
    own_columns: frozenset[int] = frozenset()  # last indices at which it has the row's own number


NOTHING = Fact()


@dataclass
class Section:
    """A partitioned program: layouts of inputs and results, and the steps of a rank."""

    jaxpr: Any
    in_layouts: Layouts
    out_layouts: Layouts
    out_facts: tuple[Fact, ...]
    steps: list[Callable[[dict[Any, Any]], None]]

    def run(self, values: Iterable[Any], consts: Sequence[Any] = ()) -> list[Any]:
        """Run the steps of a rank on its inputs."""
        env: dict[Any, Any] = dict(zip(self.jaxpr.invars, values, strict=True))
        env |= dict(zip(self.jaxpr.constvars, consts, strict=True))
        for step in self.steps:
            step(env)
        return [_read(env, var) for var in self.jaxpr.outvars]


def _read(env: dict[Any, Any], atom: Any) -> Any:
    if not isinstance(atom, Literal):
        return env[atom]
    # The type of an array names the mesh where it was made, with axes of other types than here.
    return np.asarray(atom.val) if hasattr(atom.val, "aval") else atom.val


class WholeArray:
    """Stands for the variable of a shard, gathered."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclass
class Scope:
    """The program that is being partitioned, as far as it has been read."""

    ranks: RankUnits
    scattered: dict[Any, int] = field(default_factory=dict)  # if PARTIAL, along which dimension
    whole: dict[Any, WholeArray] = field(default_factory=dict)
    layouts: dict[Any, BatchLayout] = field(default_factory=dict)
    facts: dict[Any, Fact] = field(default_factory=dict)
    steps: list[Callable[[dict[Any, Any]], None]] = field(default_factory=list)

    def layout(self, atom: Any) -> BatchLayout:
        return SAME if isinstance(atom, Literal) else self.layouts[atom]

    def layouts_of(self, atoms: Iterable[Any]) -> Layouts:
        return tuple(map(self.layout, atoms))

    def fact(self, atom: Any) -> Fact:
        if isinstance(atom, Literal):
            return Fact(np.asarray(atom.val)) if is_index_dtype(atom.aval.dtype) else NOTHING
        return self.facts.get(atom, NOTHING)

    def sum_partial(self, *atoms: Any) -> None:
        """Sum over ranks now those arrays that are parts of a sum."""
        for atom in atoms:
            if self.layout(atom).is_partial:

                def step(env: dict[Any, Any], atom: Any = atom) -> None:
                    env[atom] = self.ranks.sum(env[atom])

                self.steps.append(step)
                self.layouts[atom] = SAME

    def with_whole_operands(self, eqn: Any, indices: Iterable[int] | None = None) -> Any:
        """Return an equation with shards among its operands gathered; all, or some operands."""
        operands = list(eqn.invars)
        indices = range(len(operands)) if indices is None else indices
        shards = [i for i in indices if self.layout(operands[i]).is_shard]
        for i in shards:
            atom = operands[i]
            if atom not in self.whole:
                self.whole[atom] = self._gather(atom)
            operands[i] = self.whole[atom]
        return eqn.replace(invars=operands) if shards else eqn

    def _gather(self, atom: Any) -> WholeArray:
        whole, dim = WholeArray(atom.aval), self.layouts[atom].dim

        def step(env: dict[Any, Any]) -> None:
            env[whole] = self.ranks.gather_shards(env[atom], dim)

        self.steps.append(step)
        self.layouts[whole] = SAME
        return whole

    def scatter_results(self, eqn: Any) -> None:
        """Scatter those sums among the results of an equation that end up as shards."""
        for var in eqn.outvars:
            if var in self.scattered and self.layouts[var].is_partial:
                dim = self.scattered[var]

                def step(env: dict[Any, Any], var: Any = var, dim: int = dim) -> None:
                    env[var] = self.ranks.scatter_sum(env[var], dim)

                self.steps.append(step)
                self.layouts[var] = BatchLayout(Spread.SHARD, dim)

    def emit(self, eqn: Any, out_layouts: Sequence[BatchLayout], run: Callable[..., Any]) -> None:
        """Have ranks call `run` with the operands of an equation, for a list of its results."""

        def step(env: dict[Any, Any]) -> None:
            with _compat.source_of(eqn):
                results = run(*(_read(env, atom) for atom in eqn.invars))
            env.update(zip(eqn.outvars, results, strict=True))

        self.steps.append(step)
        self.layouts |= dict(zip(eqn.outvars, out_layouts, strict=True))

    def emit_as_is(
        self, eqn: Any, out_layouts: Sequence[BatchLayout], wanted: Sequence[BatchLayout] | None,
        **params: Any,
    ) -> None:  # fmt: skip
        """Run the operation of an equation on operands in the layouts `wanted`."""
        sources = self.layouts_of(eqn.invars)
        targets = sources if wanted is None else wanted

        def run(*operands: Any) -> list[Any]:
            return bind(eqn, map(self.ranks.convert, operands, sources, targets), **params)

        self.emit(eqn, out_layouts, run)


def is_index_dtype(dtype: Any) -> bool:
    """Whether values of a dtype may be row numbers, or tell something about them."""
    return bool(dtype == np.bool_ or jax.numpy.issubdtype(dtype, np.integer))


def bind(eqn: Any, operands: Iterable[Any], **params: Any) -> list[Any]:
    """Run the operation of an equation, with other parameters where given."""
    return _compat.bind_equation(eqn, operands, params)


Rule = Callable[[Scope, Any], None]
RULES: dict[str, Rule] = {}  # by the name of a primitive


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of some primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def partition(
    jaxpr: Any,
    in_layouts: Sequence[BatchLayout],
    ranks: RankUnits,
    *,
    in_facts: Sequence[Fact] | None = None,
    const_facts: Sequence[Fact] = (),
    scattered: Sequence[int | None] | None = None,
) -> Section:
    """Partition a program whose constants all ranks have.

    `scattered` has for each result the dimension along which a sum over ranks is scattered, or
    None.

    Raises:
        MixedExamplesError: An equation needs examples of other ranks, or has no rule.
    """
    scope = Scope(ranks)
    scope.layouts |= dict.fromkeys(jaxpr.constvars, SAME)
    scope.layouts |= dict(zip(jaxpr.invars, in_layouts, strict=True))
    if in_facts is not None:
        scope.facts |= dict(zip(jaxpr.invars, in_facts, strict=True))
    if const_facts:
        scope.facts |= dict(zip(jaxpr.constvars, const_facts, strict=True))
    if scattered is not None:
        scope.scattered = _scattered_sums(jaxpr, scattered)
    for eqn in jaxpr.eqns:
        try:
            _partition_equation(scope, eqn)
            scope.scatter_results(eqn)
        except MixedExamplesError as error:
            error.places.append((eqn.primitive.name, _compat.source_lines(eqn)))
            raise
    return Section(
        jaxpr,
        tuple(in_layouts),
        scope.layouts_of(jaxpr.outvars),
        tuple(map(scope.fact, jaxpr.outvars)),
        scope.steps,
    )


def _scattered_sums(jaxpr: Any, dims: Sequence[int | None]) -> dict[Any, int]:
    """The variables that are scattered if they are sums over ranks, and along which dimension.

    They are results. If a result is converted from what a loop or a call returns, that is scattered
    too, since a loop would stack whole sums.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    scattered: dict[Any, int] = {}
    for var, dim in zip(jaxpr.outvars, dims, strict=True):
        if dim is None or isinstance(var, Literal):
            continue
        scattered[var] = dim
        eqn = made_by.get(var)
        if eqn is not None and eqn.primitive.name == "convert_element_type":
            source = made_by.get(eqn.invars[0])
            if source is not None and source.primitive.name in ("scan", *CALLS):
                scattered[eqn.invars[0]] = dim
    return scattered


def _partition_equation(scope: Scope, eqn: Any) -> None:
    own_rule = RULES.get(eqn.primitive.name)
    if eqn.primitive.name not in TAKES_SHARDS:
        eqn = scope.with_whole_operands(eqn)
    layouts = scope.layouts_of(eqn.invars)
    if all(layout.is_same for layout in layouts):
        values = [scope.fact(atom).value for atom in eqn.invars]
        known = fold(eqn, values)
        if known is not None:
            scope.facts |= {eqn.outvars[0]: Fact(known)}
        has_program = any(_compat.is_program(param) for param in eqn.params.values())
        is_special = has_program or eqn.primitive.name in SPECIAL
        if own_rule is None or not is_special:
            scope.emit_as_is(eqn, [SAME] * len(eqn.outvars), None)
            return
    if own_rule is not None:
        own_rule(scope, eqn)
        return
    scope.sum_partial(*eqn.invars)
    if any(layout.is_rows for layout in scope.layouts_of(eqn.invars)):
        raise MixedExamplesError("may combine examples of different ranks: it is not known here")
    scope.emit_as_is(eqn, [SAME] * len(eqn.outvars), None)


def join(first: BatchLayout, second: BatchLayout) -> BatchLayout:
    """The layout that arrays of both layouts can be converted to."""
    first, second = (SAME if layout.is_shard else layout for layout in (first, second))
    if first == second or second.is_same:
        return first
    if first.is_same:
        return second
    if first.is_rows and second.is_rows:
        raise MixedExamplesError("has examples along different dimensions of one array")
    return first if first.is_rows else second if second.is_rows else PARTIAL


# Integers that are known before the program runs ------------------------------------------------

LARGEST = 2**20  # elements; larger arrays are not followed


def _broadcast(x: NDArray[Any], *, shape: Any, broadcast_dimensions: Any, **_: Any) -> NDArray[Any]:
    spread = np.ones(len(shape), int)
    spread[list(broadcast_dimensions)] = x.shape
    return np.broadcast_to(x.reshape(spread), shape)


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> NDArray[Any]:
    index = np.arange(shape[dimension]).reshape(
        [-1 if i == dimension else 1 for i in range(len(shape))]
    )
    return np.broadcast_to(index, shape).astype(dtype)


def _select(which: NDArray[Any], *cases: NDArray[Any], **_: Any) -> NDArray[Any]:
    return np.choose(which.astype(int), cases) if len(cases) < 32 else np.stack(cases)[which]


_FOLDS: dict[str, Callable[..., Any]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, dimensions, **_: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, permutation, **_: np.transpose(x, permutation),
    "concatenate": lambda *xs, dimension, **_: np.concatenate(xs, dimension),
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
    "select_n": _select,
    "lt": lambda x, y, **_: x < y,
    "le": lambda x, y, **_: x <= y,
    "gt": lambda x, y, **_: x > y,
    "ge": lambda x, y, **_: x >= y,
    "eq": lambda x, y, **_: x == y,
    "ne": lambda x, y, **_: x != y,
    "add": lambda x, y, **_: x + y,
    "sub": lambda x, y, **_: x - y,
    "mul": lambda x, y, **_: x * y,
    "max": lambda x, y, **_: np.maximum(x, y),
    "min": lambda x, y, **_: np.minimum(x, y),
    "and": lambda x, y, **_: x & y,
    "or": lambda x, y, **_: x | y,
    "not": lambda x, **_: ~x,
    "copy": lambda x, **_: x,
}


def fold(eqn: Any, operands: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """The result of an equation on known integers or booleans; None if it is not known."""
    function = _FOLDS.get(eqn.primitive.name)
    aval = eqn.outvars[0].aval
    if function is None or any(x is None for x in operands) or aval.size > LARGEST:
        return None
    kind = getattr(aval.dtype, "kind", "")
    if kind not in "iub" or not kind:
        return None
    with np.errstate(all="ignore"):  # integers wrap around, as in the program
        result: NDArray[Any] = np.asarray(function(*operands, **eqn.params)).astype(aval.dtype)
    return np.broadcast_to(result, aval.shape)
