"""What ranks run instead of calls, loops, branches and shard_maps on whole batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh.collectives.batch_layout import PARTIAL, SAME, BatchLayout, Spread
from ftmesh.collectives.batch_program import (
    CALLS,
    NOTHING,
    SUMS,
    Fact,
    Layouts,
    MixedExamplesError,
    Scope,
    Section,
    bind,
    join,
    partition,
    rule,
)
from ftmesh.collectives.partitioning import entry_axes, restrict_spec
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName


def _open(program: Any) -> tuple[Any, Sequence[Any]]:
    """A program and its constants."""
    return (program.jaxpr, program.consts) if hasattr(program, "consts") else (program, ())


def _section(
    scope: Scope,
    program: Any,
    layouts: Sequence[BatchLayout],
    facts: Sequence[Fact] | None = None,
    scattered: Sequence[int | None] | None = None,
) -> Section:
    program = _open(program)[0]
    return partition(program, layouts, scope.ranks, in_facts=facts, scattered=scattered)


@rule(*CALLS)
def call(scope: Scope, eqn: Any) -> None:
    """Run what is called in place. The derivative is in the program already."""
    params = eqn.params
    program = next(params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in params)
    facts = [scope.fact(atom) for atom in eqn.invars]
    scattered = [scope.scattered.get(var) for var in eqn.outvars]
    section = _section(scope, program, scope.layouts_of(eqn.invars), facts, scattered)
    is_again = bool(params.get("differentiated") and params.get("prevent_cse"))

    def run(*operands: Any) -> list[Any]:
        if is_again:  # keeps the compiler from using what was computed the first time
            operands = lax.optimization_barrier(operands)
        return section.run(operands, _open(program)[1])

    scope.emit(eqn, section.out_layouts, run)
    scope.facts |= dict(zip(eqn.outvars, section.out_facts, strict=True))


@rule("custom_linear_solve")
def linear_solve(scope: Scope, eqn: Any) -> None:
    """Run the solver; what tells how to differentiate it is not needed any more."""
    lengths, program = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    start = lengths.matvec + lengths.vecmat
    kept = [*range(start, start + lengths.solve), *range(sum(lengths), len(eqn.invars))]
    section = _section(scope, program, scope.layouts_of(eqn.invars[i] for i in kept))

    def run(*operands: Any) -> list[Any]:
        return section.run([operands[i] for i in kept], program.consts)

    scope.emit(eqn, section.out_layouts, run)


def _convert(scope: Scope, values: Iterable[Any], sources: Layouts, targets: Layouts) -> list[Any]:
    return [
        scope.ranks.convert(jnp.asarray(value) if source != target else value, source, target)
        for value, source, target in zip(values, sources, targets, strict=True)
    ]


def _join_all(first: Layouts, second: Layouts) -> Layouts:
    return tuple(map(join, first, second))


@rule("scan")
def scan(scope: Scope, eqn: Any) -> None:
    params, program = eqn.params, eqn.params["jaxpr"]
    num_consts, num_carry = _compat.num_scan_inputs(params)
    split = num_consts + num_carry
    whole = (i for i, atom in enumerate(eqn.invars) if i < split or not scope.layout(atom).dim)
    eqn = scope.with_whole_operands(eqn, whole)  # but for shards of what the loop goes through
    consts, xs = eqn.invars[:num_consts], eqn.invars[split:]
    scope.sum_partial(*consts, *xs)
    if any(layout.is_rows and layout.dim == 0 for layout in scope.layouts_of(xs)):
        raise MixedExamplesError("goes through the examples one by one")
    x_layouts = tuple(x.moved_to(x.dim - 1) if x.has_dim else x for x in scope.layouts_of(xs))
    const_layouts = scope.layouts_of(consts)
    facts = [*map(scope.fact, consts), *[NOTHING] * (num_carry + len(xs))]
    inits = scope.layouts_of(eqn.invars[num_consts:split])
    dims = [scope.scattered.get(var) for var in eqn.outvars[num_carry:]]
    scattered = [*[None] * num_carry, *(dim - 1 if dim else None for dim in dims)]
    carry = inits
    while True:
        layouts = (*const_layouts, *carry, *x_layouts)
        section = _section(scope, program, layouts, facts, scattered)
        joined = _join_all(carry, section.out_layouts[:num_carry])
        if joined == carry:
            break
        carry = joined
    y_layouts = section.out_layouts[num_carry:]

    def run(*operands: Any) -> list[Any]:
        const_values = operands[:num_consts]
        start = _convert(scope, operands[num_consts:split], inits, carry)

        def body(values: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            results = section.run((*const_values, *values, *rows), program.consts)
            after = _convert(scope, results[:num_carry], section.out_layouts[:num_carry], carry)
            return after, results[num_carry:]

        options = {name: params[name] for name in ("_split_transpose",) if name in params}
        last, ys = lax.scan(
            body, start, list(operands[split:]), length=params["length"],
            reverse=params["reverse"], unroll=params["unroll"], **options,
        )  # fmt: skip
        return [*last, *ys]

    outs = [*carry, *(y.moved_to(y.dim + 1) if y.has_dim else y for y in y_layouts)]
    scope.emit(eqn, outs, run)


@rule("while")
def while_(scope: Scope, eqn: Any) -> None:
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    split = num_cond + num_body
    scope.sum_partial(*eqn.invars)
    layouts = scope.layouts_of(eqn.invars)
    inits = carry = layouts[split:]
    while True:
        body = _section(scope, params["body_jaxpr"], (*layouts[num_cond:split], *carry))
        joined = _join_all(carry, body.out_layouts)
        if joined == carry:
            break
        carry = joined
    condition = _section(scope, params["cond_jaxpr"], (*layouts[:num_cond], *carry))
    if condition.out_layouts[0].is_rows:
        raise MixedExamplesError("goes on for each example as long as it needs")

    def run(*operands: Any) -> list[Any]:
        cond_consts, body_consts = operands[:num_cond], operands[num_cond:split]

        def go_on(values: list[Any]) -> Any:
            results = condition.run((*cond_consts, *values), params["cond_jaxpr"].consts)
            return _convert(scope, results, condition.out_layouts, (SAME,))[0]

        def step(values: list[Any]) -> list[Any]:
            results = body.run((*body_consts, *values), params["body_jaxpr"].consts)
            return _convert(scope, results, body.out_layouts, carry)

        start = _convert(scope, operands[split:], inits, carry)
        return list(lax.while_loop(go_on, step, start))

    scope.emit(eqn, carry, run)


@rule("cond")
def cond(scope: Scope, eqn: Any) -> None:
    programs = eqn.params["branches"]
    scope.sum_partial(*eqn.invars)
    which, *layouts = scope.layouts_of(eqn.invars)
    if which.is_rows:
        raise MixedExamplesError("branches on one example")
    sections = [_section(scope, program, layouts) for program in programs]
    outs = sections[0].out_layouts
    for section in sections[1:]:
        outs = _join_all(outs, section.out_layouts)

    def run(index: Any, *operands: Any) -> list[Any]:
        def branch(section: Section, program: Any) -> Any:
            def call_branch(*values: Any) -> list[Any]:
                results = section.run(values, program.consts)
                return _convert(scope, results, section.out_layouts, outs)

            return call_branch

        branches = list(map(branch, sections, programs))
        return list(lax.switch(jnp.asarray(index, jnp.int32), branches, *operands))

    scope.emit(eqn, outs, run)


# shard_map --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MappedAxes:
    """The mesh axes over which a shard_map in the loss maps, and what becomes of layouts there."""

    scope: Scope
    sizes: dict[Any, int]  # of the axes that become manual
    has_own_axis: bool  # whether the axis of the plan is one of them

    @staticmethod
    def of_equation(scope: Scope, eqn: Any) -> MappedAxes:
        axes = _compat.mapped_axes(eqn.params)
        sizes = {name: eqn.params["mesh"].shape[name] for name in axes}
        own_axis, shares = scope.ranks.axis_name, scope.ranks.shares
        if own_axis not in sizes:
            return MappedAxes(scope, sizes, has_own_axis=False)
        if sizes[own_axis] != shares.num_ranks or not shares.is_even:
            raise MixedExamplesError(
                f"maps over {sizes[own_axis]} devices along {own_axis!r}, which do not have a "
                "share of the examples each"
            )
        return MappedAxes(scope, sizes, has_own_axis=True)

    @property
    def others(self) -> set[Any]:
        """The axes besides that of the plan."""
        return set(self.sizes) - {self.scope.ranks.axis_name}

    def local_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """How what a rank has is sharded."""
        return restrict_spec(spec, self.others)

    def _num_parts(self, spec: PartitionSpec, dim: int) -> int:
        """Into how many parts axes other than the plan's cut a dimension of a rank's array."""
        names = entry_axes(spec[dim]) if dim < len(spec) else ()
        return math.prod(self.sizes[name] for name in names if name in self.others)

    def own_layout(self, spec: PartitionSpec, shape: Sequence[int]) -> BatchLayout:
        """The layout of an array on all ranks that is sharded by `spec`, also along their axis."""
        ranks = self.scope.ranks
        for dim, names in enumerate(map(entry_axes, spec)):
            if ranks.axis_name in names:
                before = names[: names.index(ranks.axis_name)]
                outer = math.prod(self.sizes[name] for name in before)
                if shape[dim] % (outer * ranks.units):
                    raise MixedExamplesError(
                        f"cuts a dimension of {shape[dim]} along {ranks.axis_name!r}, not by "
                        "examples"
                    )
                inner = shape[dim] // (outer * ranks.units)
                return BatchLayout(Spread.ROWS, dim, outer, inner)
        return SAME

    def enter(self, layout: BatchLayout, spec: PartitionSpec) -> BatchLayout:
        """The layout inside, where each device has its part along other axes."""
        parts = self._num_parts(spec, layout.dim) if layout.is_rows else 1
        if layout.outer % parts:
            raise MixedExamplesError("cuts examples along other axes of the mesh")
        return replace(layout, outer=layout.outer // parts)

    def leave(self, layout: BatchLayout, spec: PartitionSpec) -> BatchLayout:
        """The layout outside of a result."""
        parts = self._num_parts(spec, layout.dim) if layout.is_rows else 1
        return replace(layout, outer=layout.outer * parts)


@rule("shard_map")
def shard_map(scope: Scope, eqn: Any) -> None:
    """Map over the other axes alone: along the plan's, a rank has its part already."""
    mapped, params = MappedAxes.of_equation(scope, eqn), eqn.params
    program, in_specs, out_specs = params["jaxpr"], params["in_specs"], params["out_specs"]
    if mapped.has_own_axis:
        scope.sum_partial(*eqn.invars)
        wanted = _own_layouts(mapped, in_specs, eqn.invars)
        for have, want in zip(scope.layouts_of(eqn.invars), wanted, strict=True):
            if have.is_rows and have != want:
                raise MixedExamplesError("gives ranks the examples of others")
        outs = _own_layouts(mapped, out_specs, eqn.outvars)
        program, outs = _leave_sums(program, outs, scope.ranks.axis_name)
        section = _section(scope, program, [SAME] * len(wanted))
    else:
        wanted = list(scope.layouts_of(eqn.invars))
        section = _section(scope, program, list(map(mapped.enter, wanted, in_specs)))
        outs = list(map(mapped.leave, section.out_layouts, out_specs))
    sources = scope.layouts_of(eqn.invars)

    def run(*operands: Any) -> list[Any]:
        def inside(*operands: Any) -> list[Any]:
            return section.run(operands)

        if mapped.others:
            inside = jax.shard_map(
                inside,
                axis_names=mapped.others,
                in_specs=tuple(map(mapped.local_spec, in_specs)),
                out_specs=list(map(mapped.local_spec, out_specs)),
                check_vma=False,
            )
        return inside(*_convert(scope, operands, sources, tuple(wanted)))

    scope.emit(eqn, outs, run)


def _own_layouts(
    mapped: MappedAxes, specs: Sequence[PartitionSpec], atoms: Sequence[Any]
) -> list[BatchLayout]:
    shapes = [atom.aval.shape for atom in atoms]
    return list(map(mapped.own_layout, specs, shapes))


def _leave_sums(
    program: Any, outs: Sequence[BatchLayout], axis_name: AxisName
) -> tuple[Any, list[BatchLayout]]:
    """Leave sums over ranks that are results, such as gradients, for the program outside.

    Returns the program, and the layouts of its results.
    """
    used = {id(atom) for eqn in program.eqns for atom in eqn.invars}
    used |= {id(var) for var, out in zip(program.outvars, outs, strict=True) if out.is_rows}
    left: set[int] = set()
    equations = []
    for eqn in program.eqns:
        names = _summed_axes(eqn) if eqn.primitive.name in SUMS else ()
        if axis_name in names and not any(id(var) in used for var in eqn.outvars):
            others = tuple(name for name in names if name != axis_name)
            left |= set(map(id, eqn.outvars))
            eqn = eqn.replace(params={**eqn.params, "axes": others})
        equations.append(eqn)
    results = zip(program.outvars, outs, strict=True)
    outs = [PARTIAL if id(var) in left else out for var, out in results]
    return program.replace(eqns=equations), outs


# Collectives in a shard_map ---------------------------------------------------------------------


def _summed_axes(eqn: Any) -> tuple[Any, ...]:
    """The axes that a sum goes over; none if it is one over groups, which goes as it is."""
    return () if eqn.params.get("axis_index_groups") else tuple(eqn.params["axes"])


@rule("pvary")
def vary(scope: Scope, eqn: Any) -> None:
    scope.emit(eqn, scope.layouts_of(eqn.invars), lambda *operands: list(operands))


@rule(*SUMS)
def sum_over_axes(scope: Scope, eqn: Any) -> None:
    """Sum over ranks by the plan, and over other axes as the program does."""
    names, own_axis = _summed_axes(eqn), scope.ranks.axis_name
    others = tuple(name for name in names if name != own_axis)
    if eqn.params.get("axis_index_groups"):
        scope.emit_as_is(eqn, scope.layouts_of(eqn.invars), None)
        return

    def run(*operands: Any) -> list[Any]:
        sums = list(lax.psum(operands, others) if others else operands)
        return list(scope.ranks.sum(sums)) if own_axis in names else sums

    scope.emit(eqn, scope.layouts_of(eqn.invars), run)


@rule("pmax", "pmin", "ppermute")
def exchange(scope: Scope, eqn: Any) -> None:
    """Element by element over other axes. Along the plan's, arrays are a rank's own: see above."""
    if eqn.primitive.name != "ppermute":
        scope.sum_partial(*eqn.invars)
    scope.emit_as_is(eqn, scope.layouts_of(eqn.invars), None)


@rule("all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all")
def rearrange(scope: Scope, eqn: Any) -> None:
    """Gather or scatter over other axes, along dimensions that are not those of examples."""
    (layout,), params = scope.layouts_of(eqn.invars), eqn.params
    gathered = params.get("all_gather_dimension", params.get("concat_axis"))
    scattered = params.get("scatter_dimension", params.get("split_axis"))
    if layout.is_rows:
        if layout.dim == scattered or (params["tiled"] and layout.dim == gathered):
            raise MixedExamplesError("cuts examples along other axes of the mesh")
        if not params["tiled"]:
            dim = layout.dim - (scattered is not None and scattered < layout.dim)
            layout = layout.moved_to(dim + (gathered is not None and gathered <= dim))

    def run(x: Any) -> list[Any]:
        if eqn.primitive.name == "all_gather_invariant":
            names, tiled = params["axis_name"], params["tiled"]
            return [lax.all_gather(x, names, axis=gathered, tiled=tiled)]
        return bind(eqn, [x])

    scope.emit(eqn, [layout], run)
