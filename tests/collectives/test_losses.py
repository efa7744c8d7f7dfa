"""Losses as people write them: `Plan.value_and_grad` equals that of JAX, or rejects them."""

import linecache
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
from ftmesh.testing import cpu_grid
from tests.support import rejected_losses
from tests.support.loss_models import make_batch, weights
from tests.support.losses import AUX, EQUAL, MICROBATCHES, TABLES, groups
from tests.support.more import more_case
from tests.support.rejected_losses import REJECTED
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler", "x64")

KEY_SEED = 3
# A third of each table: of means, classifiers, sequences, modules, keys and aux.
THIRD = dict(item for table in TABLES for item in list(table.items())[2::3])
OTHERS = [{name: table[name] for name in table if name not in THIRD} for table in (EQUAL, AUX)]
QUICK = [*groups(THIRD, 23), *groups(MICROBATCHES, 1)]
SLOW = [group for table in OTHERS for group in groups(table, 23)]


@pytest.fixture(scope="module")
def x64():
    with jax.enable_x64(True):
        yield


def make_plan(executor):
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), "ring", executor=executor)


@pytest.fixture(scope="module")
def plan():
    return make_plan("ppermute")


def total(table, weights, batch, key):
    """A combination of losses, and as aux the value and the aux of each."""
    combined, outputs = 0.0, {}
    for i, (name, loss) in enumerate(table.items()):
        output = loss(weights, batch, key)
        value, aux = output if name in AUX else (output, None)
        value = jnp.mean(value)
        combined = combined + np.cos(i + 1) * value  # no two of them cancel each other
        outputs[name] = value, aux
    return combined, outputs


def differences(result, expected):
    """The names of results that differ, and by how much."""
    pairs = jax.tree_util.tree_leaves_with_path(expected)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    differing = {}
    for (path, b), a in zip(pairs, jax.tree.leaves(result), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        error = np.max(np.abs(np.float64(a) - np.float64(b)) / (1 + np.abs(b)), initial=0.0)
        if not error < 1e-7:
            differing[jax.tree_util.keystr(path)] = error
    return differing


def expected_of(loss, args):
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)


def by_plan(loss, plan, args):
    return jax.jit(plan.value_and_grad(loss, has_aux=True, replicated=2))(*args)


def on_the_native_path(loss, plan, args):
    """Plain JAX, with the batch sharded along the plan's mesh."""
    weights, batch, key = args
    mesh = plan.jax_mesh("data")
    placed = jax.device_put((weights, key), NamedSharding(mesh, P()))
    rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(placed[0], rows, placed[1])


@pytest.mark.parametrize("executor", ["xla", more_case("ppermute")])  # xla compiles in half
@pytest.mark.parametrize(
    "table",
    [QUICK[0], *map(slow, QUICK[1:]), *map(more_case, SLOW)],
    ids=lambda table: next(iter(table)),
)
def test_a_batch_that_the_chips_do_not_divide(table, executor):
    """In float64 but for one loss, so that sums in another order make no difference that counts."""
    args = weights(), make_batch(26), jax.random.key(KEY_SEED)
    loss = partial(total, table)
    result = by_plan(loss, make_plan(executor), args)
    assert not differences(result, expected_of(loss, args))


@pytest.mark.parametrize(
    "table",
    [QUICK[-1], *map(slow, [*QUICK[:-1], *SLOW])],
    ids=lambda table: next(iter(table)),
)
def test_by_a_schedule_and_on_the_native_path(plan, table):
    args = weights(), make_batch(24), jax.random.key(KEY_SEED)
    loss = partial(total, table)
    expected = expected_of(loss, args)
    assert not differences(by_plan(loss, plan, args), expected)
    assert not differences(on_the_native_path(loss, plan, args), expected)


@pytest.mark.parametrize("size", [24, 26])
@pytest.mark.parametrize("name", REJECTED)
def test_rejected_with_the_line(plan, name, size):
    loss, piece = REJECTED[name]
    with pytest.raises(ArgumentError, match=r"per_rank=True") as raised:
        jax.eval_shape(
            plan.value_and_grad(loss, replicated=2),
            weights(),
            make_batch(size),
            jax.random.key(KEY_SEED),
        )
    file, line = re.search(r" at (\w+\.py):(\d+) ", str(raised.value)).groups()
    assert file == "rejected_losses.py"
    assert piece in linecache.getline(rejected_losses.__file__, int(line))


def test_the_table_is_long_and_in_groups():
    assert len(EQUAL) + len(AUX) + len(MICROBATCHES) + len(REJECTED) >= 33 + 60
    assert sorted(name for group in (*QUICK, *SLOW) for name in group) == sorted(
        EQUAL | AUX | MICROBATCHES
    )
    for name in (
        "masked mean over words", "whitened", "Linen, batch norm", "nnx",
        "a key for each example", "batch statistics of Linen",
    ):  # fmt: skip
        assert name in THIRD
