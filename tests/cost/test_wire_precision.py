"""Floating-point formats compared with those of JAX, and the dtype of partial sums."""

import jax.numpy as jnp
import pytest

from ftmesh import ArgumentError, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.wire_precision import (
    FLOAT_FORMATS,
    accumulation_dtype,
    partial_sum_dtype,
    wire_dtype_name,
    worst_error,
)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_formats_are_those_of_jax(name):
    about = jnp.finfo(name)
    assert FLOAT_FORMATS[name].num_bytes == about.bits // 8
    assert FLOAT_FORMATS[name].roundoff == float(about.eps) / 2
    assert FLOAT_FORMATS[name].exponent_bits == about.nexp


def test_accumulation_dtype():
    assert [accumulation_dtype(name) for name in FLOAT_FORMATS] == ["float64", *["float32"] * 6]


@pytest.mark.parametrize(
    ("wire", "depth", "partials"),
    [
        ("bfloat16", 2, "bfloat16"),
        ("bfloat16", 3, "float32"),
        ("float16", 1, "float32"),  # its range is smaller
        ("float32", 10_000, "float32"),
        ("float64", 10_000, "float64"),
        ("float8_e4m3fn", 1, "float32"),
    ],
)
def test_partial_sum_dtype(wire, depth, partials):
    assert partial_sum_dtype(wire, depth=depth) == partials


def test_the_bound_is_the_worst_case():
    """Ones in bfloat16 do not grow beyond 256: 504 of them are off by half, and may be by two."""
    depth = registry.build_schedule(Topology.grid("16x32", failed="4x2@6,14"), "ring").depth
    assert depth == 503
    assert worst_error("bfloat16", depth) > 1 - 256 / 504


@pytest.mark.parametrize("name", ["float64", "int8", "bf16", "", None])
def test_dtypes_that_cannot_travel(name):
    with pytest.raises(ArgumentError, match="a floating dtype of at most 32 bits, one of float32"):
        wire_dtype_name(name)
