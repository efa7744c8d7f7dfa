"""Every case in which lax's collectives can be called, called with ours and with lax's."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ftmesh import CollectiveError
from tests.support.more import more
from tests.support.on_devices import plan_on_cpu
from tests.support.slow import slow

RNG = np.random.default_rng(0)
X = RNG.integers(-9, 9, (12, 24, 12, 5)).astype(np.float32)  # whole numbers: any order is exact


def cast(dtype):
    return lambda x: x.astype(dtype)


VALUES = {
    "floats": lambda x: x,
    "a scalar": lambda x: x[0, 0, 0],
    "nothing": lambda x: x[:0],
    "nothing, in the middle": lambda x: x[:, :0],
    "bools": lambda x: x > 0,
    "int8": cast(np.int8),
    "uint8": lambda x: jnp.abs(x).astype(np.uint8),
    "int16": cast(np.int16),
    "uint32": lambda x: jnp.abs(x).astype(np.uint32),
    "complex": lambda x: x + 1j * x,
    "bfloat16": cast(jnp.bfloat16),
    "float16": cast(np.float16),
    "weak floats": lambda x: jnp.where(x > 0, 1.0, 2.0),
    "weak whole numbers": lambda x: jnp.where(x > 0, 1, 2),
    "a Python int": lambda x: 1,
    "a Python bool": lambda x: True,
    "a Python float": lambda x: 1.5,
    "a Python complex": lambda x: 2j,
    "a NumPy number": lambda x: np.float32(3),
    "a NumPy bool": lambda x: np.bool_(True),
    "a constant": lambda x: np.ones((24, 12), np.float32),
    "a constant of doubles": lambda x: np.ones(3),
    "a constant of whole numbers": lambda x: np.arange(4),
    "no leaves": lambda x: {},
    "None": lambda x: None,
    "everything": lambda x: {
        "a": x,
        "b": [x > 0, None, (x[0, 0, 0], x[:0])],
        "c": 2,
        "d": np.ones(3),
        "e": x.astype(np.int8),
        "f": x.astype(jnp.bfloat16),
        "g": 1j * x,
        "h": True,
    },
}
CASES = {
    **{f"psum of {name}": ("psum", make, {}) for name, make in VALUES.items()},
    **{f"pmean of {name}": ("pmean", make, {}) for name, make in VALUES.items()},
    **{
        f"all_gather of {name}": ("all_gather", make, {})
        for name, make in VALUES.items()
        if name not in ("a constant of doubles", "everything")
    },
    **{
        f"all_gather {options} of {name}": ("all_gather", VALUES[name], options)
        for name in ("floats", "nothing", "bools", "a constant")
        for options in (
            {"axis": 1},
            {"axis": -1},
            {"axis": 1, "tiled": True},
            {"axis": -2, "tiled": True},
        )
    },
    **{
        f"psum_scatter {options} of {name}": ("psum_scatter", VALUES[name], options)
        for name in ("floats", "int8", "complex", "bfloat16", "weak floats", "a constant")
        for options in (
            {"tiled": True},
            {"scatter_dimension": 1},
            {"scatter_dimension": 1, "tiled": True},
        )
    },
    "psum along a tuple": ("psum", VALUES["floats"], {"axis_name": ("data",)}),
    "psum along a list": ("psum", VALUES["floats"], {"axis_name": ["data"]}),
    "all_gather along a tuple": ("all_gather", VALUES["floats"], {"axis_name": ("data",)}),
    "psum_scatter along a tuple": (
        "psum_scatter",
        VALUES["floats"],
        {"axis_name": ("data",), "tiled": True},
    ),
}

REFUSED = {
    "psum_scatter with no such dimension from the end": (
        "psum_scatter",
        VALUES["floats"],
        {"scatter_dimension": -5, "tiled": True},
    ),
    "psum_scatter with no such dimension": (
        "psum_scatter",
        VALUES["floats"],
        {"scatter_dimension": 3, "tiled": True},
    ),
    "psum_scatter of a scalar": ("psum_scatter", VALUES["a scalar"], {"tiled": True}),
    "psum_scatter of bools": ("psum_scatter", VALUES["bools"], {"tiled": True}),
    "psum_scatter of what does not divide": ("psum_scatter", VALUES["floats"], {}),
    "all_gather with no such axis": ("all_gather", VALUES["floats"], {"axis": 4}),
    "all_gather with no such axis from the end": ("all_gather", VALUES["floats"], {"axis": -5}),
    "all_gather of tiles of a scalar": ("all_gather", VALUES["a scalar"], {"tiled": True}),
    "all_gather of tiles past the last": (
        "all_gather",
        VALUES["floats"],
        {"axis": 3, "tiled": True},
    ),
}


def on_mesh(body, *, check_vma):
    """`body` on every device of a mesh with so many."""
    mesh = plan_on_cpu("ring", "4x4", "2x2@0,0").jax_mesh("data")
    return jax.shard_map(
        lambda x: jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], body(x[0])),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )


def on_ranks(body):
    return jax.vmap(lambda x: jax.tree.map(jnp.asarray, body(x)), axis_name="data")


WHERE = {
    "types checked": partial(on_mesh, check_vma=True),
    "types not checked": partial(on_mesh, check_vma=False),
    "logical ranks": on_ranks,
}


def called(module, case):
    """The collective of a case, as `module` has it, on values of one rank."""
    name, make, options = case
    return lambda x: getattr(module, name)(make(x), **{"axis_name": "data", **options})


def kind(leaf):
    """The Python type of a leaf, and its type for JAX."""
    is_number = isinstance(leaf, (bool, int, float, complex))
    aval = jax.typeof(leaf)
    varying = getattr(getattr(aval, "mat", None), "varying", frozenset())
    return type(leaf) if is_number else "array", aval.shape, aval.dtype, aval.weak_type, varying


def kinds(where, body, x):
    """The kinds of the results of a rank, while it is traced."""
    traced = []

    def record(x):
        result = body(x)
        traced.append(jax.tree.map(kind, result))
        return result

    jax.eval_shape(where(record), x)
    return traced[0]


def types_cases():
    """Quickly, every case once, and every fourth with each algorithm in each place."""
    for i, case in enumerate(CASES):
        for j, (algorithm, where) in enumerate(product(("ring", "xla"), WHERE)):
            is_quick = j == 0 or (i + j) % 4 == 0
            yield (algorithm, case, where) if is_quick else slow(algorithm, case, where)


@pytest.mark.parametrize(("algorithm", "case", "where"), list(types_cases()))
def test_types(algorithm, case, where):
    plan = plan_on_cpu(algorithm, "4x4", "2x2@0,0")
    ours, laxs = (kinds(WHERE[where], called(who, CASES[case]), X) for who in (plan, lax))
    assert ours == laxs


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("psum of")])
def test_types_with_x64(even, case):
    with jax.enable_x64(True):
        x = X.astype(np.float64)
        where = WHERE["types checked"]
        ours, laxs = (kinds(where, called(who, CASES[case]), x) for who in (even, lax))
    assert ours == laxs


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        ("ring", "types checked"),
        slow("xla", "types checked"),
        pytest.param("ring", "types not checked", marks=(pytest.mark.slow, more)),
        pytest.param("ring", "logical ranks", marks=(pytest.mark.slow, more)),
    ],
)
def test_values(algorithm, where):
    """All cases in one program, which takes less time than programs of their own."""
    plan = plan_on_cpu(algorithm, "4x4", "2x2@0,0")

    def every(module):
        return lambda x: {name: called(module, case)(x) for name, case in CASES.items()}

    ours, laxs = (jax.device_get(jax.jit(WHERE[where](every(module)))(X)) for module in (plan, lax))
    assert jax.tree.structure(ours) == jax.tree.structure(laxs)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(laxs), strict=True
    ):
        # A mean in 16 bits is rounded once, and lax's twice. Other numbers are whole, so that
        # sums are exact, and their means are off by a rounding.
        is_half = one.dtype in (jnp.bfloat16, np.float16)
        rtol = 2 * float(jnp.finfo(one.dtype).eps) if is_half else 1e-6
        wide = complex if np.iscomplexobj(one) else float
        np.testing.assert_allclose(
            one.astype(wide), other.astype(wide), rtol=rtol, atol=1e-6, err_msg=str(path)
        )


@pytest.mark.parametrize("case", REFUSED)
def test_errors_as_in_lax(even, case):
    ours, laxs = (
        jax.jit(WHERE["types checked"](called(who, REFUSED[case]))) for who in (even, lax)
    )
    with pytest.raises((ValueError, TypeError, IndexError)):
        laxs(X)
    with pytest.raises(CollectiveError):
        ours(X)


def test_psum_scatter_counts_from_the_end(even):
    """As in lax since JAX 0.11, for each leaf by itself."""

    x = {"a": np.arange(60.0).reshape(5, 12), "b": np.arange(24.0).reshape(2, 1, 12)}

    def from_the_end(_):
        return even.psum_scatter(x, "data", scatter_dimension=-1, tiled=True)

    def from_the_first(_):
        return {
            name: even.psum_scatter(leaf, "data", scatter_dimension=leaf.ndim - 1, tiled=True)
            for name, leaf in x.items()
        }

    ours, want = (
        jax.device_get(jax.jit(on_mesh(body, check_vma=True))(X))
        for body in (from_the_end, from_the_first)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, want)
    with pytest.raises(CollectiveError, match="with specs=, count it from the first"):
        on_mesh(
            lambda x: even.psum_scatter(x, "data", scatter_dimension=-1, specs=P("model")),
            check_vma=True,
        )(X)


def test_several_axes(even):
    with pytest.raises(CollectiveError, match=r"one axis, not \('data', 'model'\): call it for"):
        even.psum(jnp.ones(3), ("data", "model"))


def test_psum_of_a_constant_is_static(even):
    """As they are used for shapes."""

    def run(x):
        (size, tree) = even.psum((1, {"a": 2}), "data")
        assert (type(size), size, tree) == (int, 12, {"a": 24})
        return x + jnp.zeros(size)

    assert jax.eval_shape(on_ranks(run), np.ones((12, 12))).shape == (12, 12)
