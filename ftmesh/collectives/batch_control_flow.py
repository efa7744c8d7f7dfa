"""What ranks run instead of calls, loops and branches on whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ftmesh.collectives.batch_layout import SAME, BatchLayout
from ftmesh.collectives.batch_program import (
    NOTHING,
    Fact,
    Layouts,
    MixedExamplesError,
    Scope,
    Section,
    join,
    partition,
    rule,
)
from ftmesh.execute import _compat


def _open(program: Any) -> tuple[Any, Sequence[Any]]:
    """A program and its constants."""
    return (program.jaxpr, program.consts) if hasattr(program, "consts") else (program, ())


def _section(
    scope: Scope, program: Any, layouts: Sequence[BatchLayout], facts: Sequence[Fact] | None = None
) -> Section:
    return partition(_open(program)[0], layouts, scope.ranks, in_facts=facts)


@rule("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call")
@rule("custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "composite", "eval_jaxpr")
def call(scope: Scope, eqn: Any) -> None:
    """Run what is called in place. The derivative is in the program already."""
    params = eqn.params
    program = next(params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in params)
    facts = [scope.fact(atom) for atom in eqn.invars]
    section = _section(scope, program, scope.layouts_of(eqn.invars), facts)
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
    consts, xs = eqn.invars[:num_consts], eqn.invars[split:]
    scope.sum_partial(*consts, *xs)
    if any(layout.is_rows and layout.dim == 0 for layout in scope.layouts_of(xs)):
        raise MixedExamplesError("goes through the examples one by one")
    x_layouts = tuple(x.at(x.dim - 1) if x.is_rows else x for x in scope.layouts_of(xs))
    const_layouts = scope.layouts_of(consts)
    facts = [*map(scope.fact, consts), *[NOTHING] * (num_carry + len(xs))]
    inits = scope.layouts_of(eqn.invars[num_consts:split])
    carry = inits
    while True:
        section = _section(scope, program, (*const_layouts, *carry, *x_layouts), facts)
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

    outs = [*carry, *(y.at(y.dim + 1) if y.is_rows else y for y in y_layouts)]
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
