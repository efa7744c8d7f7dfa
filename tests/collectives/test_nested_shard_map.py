"""Losses with a shard_map of their own, over other axes or that of the plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
from ftmesh.execute import _compat
from tests.support.compiled_text import collectives
from tests.support.slow import slow
from tests.support.whole_batch import ARGS, assert_close, losses, on_ranks, on_tiles, plan_of_pairs

pytestmark = pytest.mark.usefixtures("quick_compiler")
two_axes = pytest.mark.skipif(not _compat.SUPPORTS_NESTED_SHARD_MAP, reason="takes JAX 0.10")

BOTH = {"data", "model"}


@pytest.fixture(scope="module")
def tiles():
    return plan_of_pairs()


# Over other axes --------------------------------------------------------------------------------


def mapped_loss(body, in_specs, out_spec, axes=("model",), **options):
    """A loss whose predictions are computed in a shard_map."""

    def loss(p, x, y):
        run = jax.shard_map(
            body, axis_names=set(axes), in_specs=in_specs, out_specs=out_spec, **options
        )
        return ((run(x, p["w"], p["v"]) - y) ** 2).mean()

    return loss


def whole_units(x, w, v):
    """A product that is summed over the model axis."""
    return lax.psum(jnp.tanh(x @ w) @ v, "model")


def gathered_units(x, w, v):
    hidden = lax.all_gather(jnp.tanh(x @ w), "model", axis=1, tiled=True)
    return hidden @ lax.all_gather(v, "model", tiled=True) / lax.axis_size("model")


def stacked_units(x, w, v):
    hidden = lax.all_gather(jnp.tanh(x @ w), "model", axis=0)
    return jnp.einsum("mbh,mh->b", hidden, lax.all_gather(v, "model", axis=0))


def scattered_units(x, w, v):
    partial_sums = lax.psum_scatter(jnp.tanh(x @ w), "model", scatter_dimension=1, tiled=True)
    return lax.psum(partial_sums.sum(1), "model") * lax.psum(v.sum(), "model")


def ring_of_units(x, w, v):
    """As in ring attention: weights go around."""
    total, size = 0, lax.axis_size("model")
    for _ in range(size):
        total += jnp.tanh(x @ w) @ v
        w, v = lax.ppermute((w, v), "model", [(i, (i + 1) % size) for i in range(size)])
    return lax.pmean(total, "model")


def exchanged_units(x, w, v):
    """As experts do: features go to other devices, and come back."""
    hidden = jnp.tanh(x @ w)[:, :, None] * jnp.ones(2)
    there = lax.all_to_all(hidden, "model", split_axis=2, concat_axis=1, tiled=True)
    back = lax.all_to_all(jnp.sin(there), "model", split_axis=1, concat_axis=2, tiled=True)
    return lax.psum(back.sum(2) @ v, "model")


def normed_units(x, w, v):
    """A statistic of all examples, which ranks sum, and the largest unit of each."""
    hidden = x @ w
    hidden = hidden - hidden.mean(0)
    largest = lax.pmax(lax.stop_gradient(hidden.max(1, keepdims=True)), "model")
    return lax.psum(jnp.exp(hidden - largest) @ v, "model")


SPLIT = (P(), P(None, "model"), P("model"))


@two_axes
@pytest.mark.parametrize(
    ("body", "check_vma"),
    [
        (whole_units, True),
        slow(whole_units, False),
        slow(gathered_units, False),
        (stacked_units, False),
        slow(scattered_units, True),
        slow(scattered_units, False),
        slow(ring_of_units, True),
        slow(ring_of_units, False),
        (exchanged_units, True),
        slow(exchanged_units, False),
        (normed_units, True),
        slow(normed_units, False),
    ],
)
def test_shard_map_over_another_axis(tiles, body, check_vma):
    loss = mapped_loss(body, SPLIT, P(), check_vma=check_vma)
    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


@two_axes
def test_a_batch_that_ranks_do_not_divide(tiles):
    params, x, y = ARGS
    loss = mapped_loss(normed_units, SPLIT, P())
    _, result, expected = on_tiles(tiles, loss, args=(params, x[:35], y[:35]))
    assert_close(result, expected)


@two_axes
def test_shard_map_in_a_scan(tiles):
    """Layers of tensor parallelism in a scan, computed again in the backward pass."""

    def loss(p, x, y):
        def body(x, w):
            return x + lax.psum(jnp.tanh(x @ w) @ w.T, "model")

        @jax.checkpoint
        def layer(x, w):
            run = jax.shard_map(
                body, axis_names={"model"}, in_specs=(P(), P(None, "model")), out_specs=P()
            )
            return run(x, w), None

        x, _ = lax.scan(layer, x, jnp.stack([p["w"], -p["w"] / 2]))
        return losses(p, x, y).mean()

    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


@two_axes
def test_examples_scattered_over_another_axis_raise(tiles):
    def body(x, w, v):
        hidden = lax.psum_scatter(x @ w, "model", scatter_dimension=0, tiled=True)
        return lax.all_gather(hidden, "model", tiled=True) @ v

    loss = mapped_loss(body, SPLIT, P(), check_vma=False)
    line = body.__code__.co_firstlineno + 1
    match = rf"test_nested_shard_map.py:{line} cuts examples along other axes of the mesh"
    with pytest.raises(ArgumentError, match=match):
        on_tiles(tiles, loss)
    cut = mapped_loss(lambda x, w, v: x @ w @ v, (P("model"), P(), P()), P("model"))
    with pytest.raises(ArgumentError, match="cuts examples along other axes of the mesh"):
        on_tiles(tiles, cut, weights=P())


# Over the axis of the plan ----------------------------------------------------------------------

ROWS = (P("data"), P(None, "model"), P("model"))


@two_axes
@pytest.mark.parametrize(
    ("body", "check_vma"),
    [
        (whole_units, True),
        slow(whole_units, False),
        slow(ring_of_units, True),
        slow(exchanged_units, True),
        slow(exchanged_units, False),
    ],
)
def test_shard_map_over_both_axes(tiles, body, check_vma):
    loss = mapped_loss(body, ROWS, P("data"), BOTH, check_vma=check_vma)
    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


@two_axes
@pytest.mark.parametrize("check_vma", [True, slow(False)], ids=["vma", "no_vma"])
def test_examples_along_both_axes(tiles, check_vma):
    def body(x, w, v):
        return jnp.tanh(x @ w) @ v

    rows = P(("data", "model"))
    loss = mapped_loss(body, (rows, P(), P()), rows, BOTH, check_vma=check_vma)
    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()
    other = P(("model", "data"))
    with pytest.raises(ArgumentError, match="gives ranks the examples of others"):
        on_tiles(tiles, mapped_loss(body, (other, P(), P()), other, BOTH))


def test_statistics_of_all_ranks(even):
    """Sums over the axis go by the plan; so do gradients, in one sum with the others."""

    def body(x, numbers, w, v):
        hidden = x @ w + numbers[:, None]
        hidden = hidden - lax.pmean(hidden.mean(0), "data")
        return jnp.tanh(hidden) @ v, lax.psum(hidden.sum(), "data")

    def loss(p, x, y):
        run = jax.shard_map(
            body, in_specs=(P("data"), P("data"), P(), P()), out_specs=(P("data"), P())
        )
        predicted, total = run(x, jnp.arange(len(x)) / len(x), p["w"], p["v"])
        return ((predicted - y) ** 2).mean() + total**2

    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


def test_gradients_are_summed_once(even):
    """Those of weights in a shard_map too: as many permutations as without one."""

    def loss(p, x, y):
        run = jax.shard_map(
            lambda x, w, v: jnp.tanh(x @ w) @ v,
            in_specs=(P("data"), P(), P()),
            out_specs=P("data"),
        )
        return ((run(x, p["w"], p["v"]) - y) ** 2).mean()

    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()
    plain, _, _ = on_ranks(even, lambda p, x, y: losses(p, x, y).mean())
    assert len(collectives(program)) == len(collectives(plain))


def test_other_shares_of_the_batch_raise(even):
    def loss(p, x, y):
        run = jax.shard_map(lambda x, w: x @ w, in_specs=(P(), P()), out_specs=P())
        return losses(p, run(x, p["w"] @ p["w"].T), y).mean()

    line = loss.__code__.co_firstlineno + 2
    match = (
        f"'shard_map' at test_nested_shard_map.py:{line} gives ranks the examples of others, and a"
    )
    with pytest.raises(ArgumentError, match=match):
        on_ranks(even, loss)


def test_a_weight_cut_along_the_axis(even):
    """Ranks compute with their parts of a weight that all of them have."""
    params = ARGS[0] | {"u": np.arange(24, dtype=np.float32)}

    def loss(p, x, y):
        run = jax.shard_map(
            lambda u: lax.psum((u**2).sum() * lax.axis_index("data"), "data"),
            in_specs=P("data"),
            out_specs=P(),
        )
        return losses(p, x, y).mean() + run(p["u"])

    program, result, expected = on_ranks(even, loss, (params, *ARGS[1:]))
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


def test_collectives_over_the_axis(even):
    """Sums over groups of ranks, and a sum that each rank keeps, go as they are written."""
    groups = [list(range(6)), list(range(6, 12))]

    def body(x, w, v):
        hidden = jnp.tanh(x @ w)
        of_group = lax.psum(hidden.sum(0), "data", axis_index_groups=groups)
        before = lax.ppermute(hidden, "data", [(i, (i + 1) % 12) for i in range(12)])
        return (hidden * of_group + before) @ v, lax.psum(hidden.sum(0, keepdims=True), "data")

    def loss(p, x, y):
        run = jax.shard_map(
            body, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=False
        )
        predicted, sums = run(x, p["w"], p["v"])
        return ((predicted - y) ** 2).mean() + (sums**2).mean()

    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    kinds = sorted({entry.kind for entry in ftmesh.audit(program, "data")})
    assert kinds == ["all-reduce", "collective-permute"], "those that the plan has no part in"


def scattered_mean(w, x, y):
    """Its gradient adds to the places that the examples of a rank name."""
    return lax.pmean(((w[y.astype(int) % 3] - y) ** 2).mean(), "data")


def segment_mean(w, x, y):
    sums = jax.ops.segment_sum(x * w, y.astype(int) % 3, num_segments=3)
    return (lax.psum(sums, "data") ** 2).mean()


def added_mean(w, x, y):
    sums = jnp.zeros((3, 6)).at[y.astype(int) % 3].add(x * w.sum())
    return (lax.psum(sums, "data") ** 2).mean()


@pytest.mark.parametrize("body", [scattered_mean, segment_mean, added_mean])
def test_ranks_scatter_their_own_examples(even, body):
    x, labels = ARGS[1], np.arange(len(ARGS[1]), dtype=np.float32)
    weights = np.arange(1, 7, dtype=np.float32)

    def loss(w, x, y):
        return jax.shard_map(body, in_specs=(P(), P("data"), P("data")), out_specs=P())(w, x, y)

    _, result, expected = on_ranks(even, loss, (weights, x, labels))
    assert_close(result, expected)
