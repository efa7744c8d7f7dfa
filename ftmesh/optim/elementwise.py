"""Elementwise: whether a function may be given shards in place of whole arrays.

It may if it does the same to every element, whatever the element's place, and does the same to a
shard as to a whole array. Both are read from the traced function, not from its name: a norm, a
sort or a random number for each element is found wherever it hides, and so is a mask that depends
on a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ftmesh.errors import ArgumentError

# Operations that give an element from elements at the same place.
_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_SPREADING = {"broadcast_in_dim", "reshape", "squeeze"}  # one number, at every place
_CALLS = {"checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"}
_ABOUT_SHAPES = {"shape", "sharding"}


class NotElementwiseError(ArgumentError):
    """A function of arrays cannot be given shards of them."""


@dataclass(frozen=True)
class _Value:
    """What is known of a value: a name, whether it is sharded, and else if it is one number."""

    name: Any
    sharded: bool
    uniform: bool


def require_elementwise(
    function: Callable[..., Any], wholes: Any, shards: Any, is_sharded: Any
) -> None:
    """Refuses a `function` that gives something else on shards than on whole arrays.

    `wholes` and `shards` are tuples of arguments as ``jax.ShapeDtypeStruct``; in the leaves that
    `is_sharded` marks, the shards have their own shapes.
    """
    flags = jax.tree.leaves(is_sharded)
    on_wholes, on_shards = (
        list(_Walk().steps(jax.make_jaxpr(function)(*args), flags)) for args in (wholes, shards)
    )
    if on_wholes != on_shards:
        raise NotElementwiseError(
            "this optimizer would do something else with shards than with whole tensors: a mask or "
            "a choice in it depends on the size of a tensor. Give masks as pytrees of booleans, or "
            "as functions of names or of the number of dimensions, which shards keep"
        )


class _Walk:
    """A walk through a traced function that follows sharded values."""

    def __init__(self) -> None:
        self.named = 0

    def steps(self, closed: ClosedJaxpr, sharded: list[bool]) -> Iterator[Any]:
        """Every operation in turn; equal for functions that do the same."""
        inputs = [
            self.value(var.aval, sharded=flag)
            for var, flag in zip(closed.jaxpr.invars, sharded, strict=True)
        ]
        results: list[_Value] = []
        yield from self.inside(closed, inputs, results)
        for value, var in zip(results, closed.jaxpr.outvars, strict=True):
            yield value.name, None if value.sharded or value.uniform else var.aval.shape

    def value(self, aval: Any, *, sharded: bool = False, uniform: bool = False) -> _Value:
        self.named += 1
        return _Value(self.named, sharded, (uniform or not aval.shape) and not sharded)

    def inside(self, closed: Any, inputs: list[_Value], results: list[_Value]) -> Iterator[Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False):
            known[var] = _constant(const) or self.value(var.aval)

        def read(var: Any) -> _Value:
            if isinstance(var, Literal):
                return _constant(var.val) or self.value(var.aval)
            return known[var]

        for step in jaxpr.eqns:
            made: list[_Value] = []
            yield from self.step(step, [read(var) for var in step.invars], made)
            known.update(zip(step.outvars, made, strict=True))
        results.extend(read(var) for var in jaxpr.outvars)

    def step(self, step: Any, inputs: list[_Value], made: list[_Value]) -> Iterator[Any]:
        name, params = step.primitive.name, step.params
        uniform = all(value.uniform for value in inputs)
        if name in _CALLS:
            inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            yield from self.inside(inner, inputs, made)
        elif name == "cond" and not inputs[0].sharded:
            yield name, inputs[0].name
            yield from self.branches(step, inputs[1:], made)
        elif name == "optimization_barrier" or (name in _SPREADING and uniform):
            made.extend(inputs)
        else:
            options = {key: str(params[key]) for key in sorted(params.keys() - _ABOUT_SHAPES)}
            yield name, [value.name for value in inputs], str(options)
            sharded = any(value.sharded for value in inputs)
            if sharded:
                _check_step(step, inputs)
            uniform = uniform and name in _ELEMENTWISE
            made.extend(
                self.value(var.aval, sharded=sharded, uniform=uniform) for var in step.outvars
            )

    def branches(self, step: Any, inputs: list[_Value], made: list[_Value]) -> Iterator[Any]:
        ends: list[list[_Value]] = []
        for branch in step.params["branches"]:
            ends.append([])
            yield from self.inside(branch, inputs, ends[-1])
            yield [value.name for value in ends[-1]]
        for var, values in zip(step.outvars, zip(*ends, strict=True), strict=True):
            made.append(
                self.value(
                    var.aval,
                    sharded=any(value.sharded for value in values),
                    uniform=all(value.uniform for value in values),
                )
            )


def _constant(value: Any) -> _Value | None:
    """A number that is written into the function."""
    if isinstance(value, jax.core.Tracer) or np.ndim(value):
        return None
    return _Value(("number", str(value)), sharded=False, uniform=True)


def _check_step(step: Any, inputs: list[_Value]) -> None:
    """An operation on sharded values works place by place."""
    name = step.primitive.name
    shapes = {var.aval.shape for var, v in zip(step.invars, inputs, strict=True) if v.sharded}
    shapes |= {var.aval.shape for var in step.outvars}
    if name not in _ELEMENTWISE or len(shapes) > 1:
        raise NotElementwiseError(
            f"this optimizer cannot be sharded: its {name!r} takes more of a tensor than one "
            "element, and a chip has only its shard of the tensor. For norms of whole tensors take "
            "lars, lamb or clip_by_global_norm of ftmesh.train, which add them up over all chips; "
            "otherwise do not shard this optimizer"
        )
    if not all(value.sharded or value.uniform for value in inputs):
        raise NotElementwiseError(
            f"this optimizer cannot be sharded: its {name!r} takes an array that differs from "
            "place to place, such as random numbers, and is not sharded as the tensors are"
        )
