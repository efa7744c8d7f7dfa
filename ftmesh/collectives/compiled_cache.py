"""Compiled programs of functions that are called outside jit, kept by what the functions do.

A function is traced at each call, as its Python code may do something else each time, but compiled
only if its program is a new one. Arrays that it closes over are arguments of the program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from ftmesh.execute import _compat
from ftmesh.execute.types import PyTree

MAX_PROGRAMS = 64

_programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()


def compile_once(key: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return ``jax.jit(make())``, or what it was for an equal key."""
    if key not in _programs:
        _programs[key] = jax.jit(make())
        while len(_programs) > MAX_PROGRAMS:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key]


def run_compiled(function: Callable[[PyTree], PyTree], args: PyTree) -> PyTree:
    """Call ``jax.jit(function)(args)``, which is compiled once for all equal programs."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(args)
    jaxpr = closed.jaxpr

    def run(consts: Sequence[Any], *arrays: Any) -> list[Any]:
        return _compat.eval_program(jaxpr, consts, arrays)

    compiled = compile_once(fingerprint(jaxpr), lambda: run)
    results = compiled(closed.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def fingerprint(jaxpr: Any) -> Hashable:
    """A key that is equal for programs that compute the same in the same way."""
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        if isinstance(x, Literal):
            return "literal", str(x.aval), x.aval.weak_type, np.asarray(x.val).tobytes()
        return numbers.setdefault(x, len(numbers))

    def define(var: Any) -> Hashable:
        return atom(var), str(var.aval), getattr(var.aval, "weak_type", False)

    parts: list[Hashable] = [tuple(map(define, (*jaxpr.constvars, *jaxpr.invars)))]
    for eqn in jaxpr.eqns:
        params = tuple(
            (name, _param_key(value))
            for name, value in sorted(eqn.params.items())
            if not (callable(value) and eqn.primitive.name.startswith("custom_"))
        )
        parts.append(
            (
                eqn.primitive.name,
                params,
                tuple(map(atom, eqn.invars)),
                tuple(map(define, eqn.outvars)),
            )
        )
    parts.append(tuple(map(atom, jaxpr.outvars)))
    return tuple(parts)


def _param_key(value: Any) -> Hashable:
    if hasattr(value, "eqns"):
        consts = tuple(map(_param_key, getattr(value, "consts", ())))
        return fingerprint(getattr(value, "jaxpr", value)), consts
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(_param_key, value))
    if isinstance(value, dict):
        return "dict", tuple((key, _param_key(value[key])) for key in sorted(value, key=str))
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return type(value).__name__, value


class _Identity:
    """Compares an object that has no hash by identity, and keeps it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
