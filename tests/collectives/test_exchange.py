"""pmax, pmin, all_to_all and ppermute give what jax.lax gives, also around failed chips."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import CollectiveError, Topology, audit
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")
RING = [(0, 1), (1, 2), (2, 0)]
FAR = [(0, 5), (5, 0), (3, 3), (10, 2), (7, 11), (1, 8)]
CALLS = {
    "pmax": lambda c, x: c("pmax", x),
    "pmin": lambda c, x: c("pmin", x),
    "ppermute": lambda c, x: c("ppermute", x, perm=FAR),
    "shift": lambda c, x: c("ppermute", x, perm=[(i, (i + 1) % 12) for i in range(12)]),
    "all_to_all": lambda c, x: c("all_to_all", x, split_axis=0, concat_axis=1),
    "tiled": lambda c, x: c("all_to_all", x, split_axis=0, concat_axis=1, tiled=True),
    "blocks": lambda c, x: c("all_to_all", x, split_axis=1, concat_axis=0, tiled=True),
}


@pytest.fixture(scope="module")
def twelve():
    """Twelve chips around a hole, on a ring of single hops."""
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"))


@pytest.fixture(scope="module")
def without_ring():
    """Chips whose ring has a step over the failed one."""
    return ftmesh.plan(cpu_grid("2x3", failed="1x1@0,1"), executor="ppermute")


def bound(where, name, x, **options):
    """Call a collective of `where`, which is jax.lax or a plan."""
    return getattr(where, name)(x, "data", **options)


def tree():
    rng = np.random.default_rng(0)
    numbers = rng.integers(-99, 99, (12, 12, 24, 2))
    return {
        "float": jnp.asarray(numbers, jnp.float32),
        "narrow": jnp.asarray(numbers, jnp.bfloat16),
        "int": jnp.asarray(numbers, jnp.int8),
        "bool": jnp.asarray(numbers > 90),
    }


def run(where, call, plan, x, *, check_vma=True):
    def rank(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        y = call(partial(bound, where), x)
        return jax.tree.map(lambda leaf: leaf[None], y)

    mapped = jax.shard_map(
        rank, mesh=plan.jax_mesh("data"), in_specs=P("data"), out_specs=P("data"),
        check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(mapped)(x)


@pytest.mark.parametrize("check_vma", [True, slow(False)])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_dtypes_are_those_of_lax(twelve, name, check_vma):
    want = run(lax, CALLS[name], twelve, tree(), check_vma=check_vma)
    got = run(twelve, CALLS[name], twelve, tree(), check_vma=check_vma)
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_wrong_direction_is_caught(twelve, monkeypatch):
    """The planted fault: blocks pass on the other way round."""
    from ftmesh.collectives import exchange

    shift = exchange._shift
    monkeypatch.setattr(exchange, "_shift", lambda x, by, *args: shift(x, -by, *args))
    with pytest.raises(AssertionError):
        test_values_and_dtypes_are_those_of_lax(twelve, "all_to_all", True)


@pytest.mark.parametrize("name", ["ppermute", "tiled"])  # lax cannot transpose "all_to_all"
def test_gradients_are_those_of_lax(twelve, name):
    x = tree()["float"]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def gradient(where):
        def loss(x):
            y = run(where, CALLS[name], twelve, x)
            return jnp.sum(y.reshape(x.shape) * weights)

        return jax.grad(loss)(x)

    np.testing.assert_array_equal(gradient(twelve), gradient(lax))


def test_a_maximum_has_no_gradient_as_in_lax(twelve):
    for where in (lax, twelve):
        with pytest.raises(NotImplementedError, match="pmax"):
            jax.grad(lambda x, w=where: run(w, CALLS["pmax"], twelve, x).sum())(tree()["float"])


@pytest.mark.parametrize("name", CALLS)
def test_vmap(twelve, name):
    """Over another axis inside, and with ranks that are those of a vmap."""
    x = tree()["float"]

    def inner(where):
        return run(where, lambda c, x: jax.vmap(partial(CALLS[name], c), 2, 2)(x), twelve, x)

    np.testing.assert_array_equal(inner(twelve), inner(lax))
    emulated = on_one_device(lambda x: CALLS[name](partial(bound, twelve), x))
    np.testing.assert_array_equal(emulated(x), run(lax, CALLS[name], twelve, x))


@pytest.mark.parametrize("name", ["pmax", "pmin", "ppermute", "all_to_all"])
def test_without_a_ring(without_ring, name):
    """Everything is gathered on the plan: nothing goes by routes that XLA chooses."""
    x = jnp.asarray(np.random.default_rng(2).integers(-9, 9, (5, 5, 3)), jnp.float32)
    call = CALLS[name]
    if name == "ppermute":
        call = lambda c, x: c("ppermute", x, perm=[(0, 3), (3, 1), (2, 2)])  # noqa: E731
    np.testing.assert_array_equal(
        run(without_ring, call, without_ring, x), run(lax, call, without_ring, x)
    )
    jaxpr = str(jax.make_jaxpr(lambda x: run(without_ring, call, without_ring, x))(x))
    assert "ftmesh_all" in jaxpr
    for primitive in (" pmax", " pmin", " all_to_all", " ppermute"):
        assert f"{primitive}[" not in jaxpr


def test_idle_devices():
    """They give nothing to a maximum, and get it; they take no part in a permutation."""
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), with_idle=True)
    x = jnp.arange(16.0).at[12:].set(99)
    assert run(plan, CALLS["pmax"], plan, x).tolist() == [11] * 16
    assert run(plan, CALLS["pmin"], plan, x - 50).tolist() == [-50] * 16
    moved = run(plan, lambda c, x: c("ppermute", x, perm=[(1, 7), (11, 0)]), plan, x)
    assert moved.tolist() == [11, *[0] * 6, 1, *[0] * 8]
    with pytest.raises(CollectiveError, match="rank 13 is a target of ppermute"):
        run(plan, lambda c, x: c("ppermute", x, perm=[(1, 13)]), plan, x)
    with pytest.raises(CollectiveError, match="all_to_all gives every rank its part"):
        run(plan, lambda c, x: c("all_to_all", x, split_axis=0, concat_axis=0), plan, x)


def test_pmap(twelve):
    devices = list(twelve.jax_mesh("data").devices.flat)
    for name in ("pmax", "all_to_all"):
        got = jax.pmap(
            lambda x, n=name: CALLS[n](partial(bound, twelve), x), "data", devices=devices
        )(tree()["float"])
        np.testing.assert_array_equal(got, run(lax, CALLS[name], twelve, tree()["float"]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p, x: p.pmax(x, "rows"), "axis 'rows' is not bound here: call pmax inside"),
        (lambda p, x: p.ppermute(x, "data", [(0, 1), (0, 2)]), "rank 0 is a source of ppermute"),
        (lambda p, x: p.ppermute(x, "data", [(0, 12)]), "ranks are 0 to 11"),
        (lambda p, x: p.all_to_all(x, "data", 3, 0), "split_axis of all_to_all is 3"),
        (lambda p, x: p.all_to_all(x, "data", 1, 0), "dimension 1 has size 24, and must have 12"),
        (lambda p, x: p.all_to_all(x, "data", 2, 0, tiled=True), "a multiple of 12"),
    ],
    ids=range(6),
)
def test_errors(twelve, call, words):
    with pytest.raises(CollectiveError, match=words):
        on_one_device(lambda x: call(twelve, x))(tree()["float"])


@pytest.mark.parametrize("name", ["pmax", "shift", "all_to_all"])
def test_a_mesh_in_another_order_is_rejected(twelve, name):
    devices = np.roll(twelve.jax_mesh("data").devices, 1)
    rank = jax.shard_map(
        lambda x: CALLS[name](partial(bound, twelve), x[0])[None],
        mesh=Mesh(devices, "data"), in_specs=P("data"), out_specs=P("data"),
    )  # fmt: skip
    with pytest.raises(CollectiveError, match="or another order, than the mesh of axis 'data'"):
        jax.jit(rank)(tree()["float"])


def test_audit(twelve):
    """What lax sends across the hole is listed with the plan's function; the plan's own is not."""
    mesh = twelve.jax_mesh("data")

    def compiled(where):
        def rank(x):
            y = CALLS["all_to_all"](partial(bound, where), x)
            y += CALLS["ppermute"](partial(bound, where), x.reshape(y.shape))
            return y + CALLS["pmax"](partial(bound, where), x.reshape(y.shape))

        mapped = jax.shard_map(rank, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jax.jit(mapped).lower(jnp.ones((144, 4))).compile()

    audit(compiled(twelve), "data", plan=twelve).require_none()
    advice = " ".join(entry.advice for entry in audit(compiled(lax), "data", plan=twelve))
    assert "call plan.all_to_all" in advice
    assert "call plan.ppermute" in advice


@pytest.mark.parametrize(
    "grid", [("4x4", "1x1@1,1"), slow(("16x16", "2x2@4,4"))], ids=["15", "252"]
)
def test_many_ranks(grid):
    """Values at 15 ranks; at 252 the size of the program, which does not grow with them."""
    plan = ftmesh.plan(Topology.grid(grid[0], failed=grid[1]))
    n = plan.program.num_ranks
    x = jnp.arange(n * n).reshape(n, n)
    exchange = on_one_device(lambda x: plan.all_to_all(x, "data", 0, 0))
    if n < 20:
        np.testing.assert_array_equal(exchange(x), x.T)
    text = jax.jit(exchange).lower(x).as_text()
    assert len(text.splitlines()) < 1000
