"""Batch normalization over groups of chips, against one device with all examples."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.collectives import BatchShares, with_mean_gradients
from ftmesh.nn import ChipGroups, GroupBatchNorm, mean_batch_stats
from ftmesh.testing import cpu_grid, on_one_device
from ftmesh.topology.ranks import Ranks

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def plan():
    return ftmesh.plan(cpu_grid("8x8", failed="2x2@2,2"), "ring")


@st.composite
def groupings(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    ranks = draw(st.permutations(range(sum(sizes) + draw(st.integers(0, 2)))))
    starts = np.cumsum([0, *sizes])
    groups = [ranks[start : start + n] for start, n in zip(starts, sizes, strict=False)]
    return ChipGroups(tuple(map(tuple, groups)), len(ranks))


class TestChipGroups:
    @given(groupings())
    def test_exchanges_sum_groups_of_any_size(self, groups):
        """Run in NumPy: every rank ends with each contribution of its group once."""
        held = np.eye(groups.num_ranks, dtype=int)
        exchanges = groups.exchanges
        for partner, adds, replaces in exchanges:
            assert (partner[partner] == np.arange(groups.num_ranks)).all()
            other = held[partner]
            assert not (adds & replaces).any()
            held = np.where(replaces[:, None], other, held + adds[:, None] * other)
        for group in groups.ranks:
            for rank in group:
                assert held[rank].nonzero()[0].tolist() == sorted(group)
                assert held[rank].max() == 1
        sizes = [len(group) for group in groups.ranks]
        assert len(exchanges) == max(n.bit_length() - 1 + 2 * (n & n - 1 > 0) for n in sizes)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_sum_on_devices(self, check_vma):
        plan = ftmesh.plan(cpu_grid("4x4", failed="1x1@2,1"), "row_pair")
        groups = ChipGroups.of_size(plan, 4)
        assert sorted(map(len, groups.ranks)) == [3, 4, 4, 4]
        x = np.random.default_rng(0).normal(size=(15, 7)).astype(np.float32)
        body = jax.shard_map(
            lambda x: groups.sum(x[0], "data")[None],
            mesh=plan.jax_mesh("data"),
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        sums = jax.device_get(jax.jit(body)(x))
        for group in groups.ranks:
            rows = sums[list(group)]
            np.testing.assert_allclose(rows[0], x[list(group)].sum(axis=0), rtol=1e-5, atol=1e-6)
            assert (rows == rows[0]).all(), "ranks of a group must get the same bits"

    def test_groups_are_neighbours_with_all_devices(self):
        topology = Topology.grid("4x4", failed="1x1@2,1")
        two = Topology(topology.shape, topology.wrap, topology.failed, devices_per_chip=2)
        rank = {coord: i for i, coord in enumerate(Ranks(topology).coords)}
        expected = tuple(rank[coord] for coord in ((2, 0), (3, 0), (3, 1)))
        assert expected == (2, 3, 4)
        assert ChipGroups.of_size(ftmesh.plan(topology), 4).ranks[1] == expected
        assert ChipGroups.of_size(ftmesh.plan(two), 4).ranks[1] == (4, 5, 6, 7, 8, 9)
        idle = ftmesh.plan(topology, with_idle=True)
        assert ChipGroups.of_size(idle, 4).ranks[1] == expected
        groups = ChipGroups.of_size(idle, 4).ranks
        assert [len(group) for group in groups] == [4, 3, 4, 4]
        for group in groups:
            corners = {tuple(c // 2 for c in Ranks(topology).coords[rank]) for rank in group}
            assert len(corners) == 1
        assert ChipGroups.of_size(idle, 4).num_ranks == 16

    def test_smallest_groups_with_enough_examples(self, plan):
        sizes = [
            max(map(len, ChipGroups.for_examples(plan, examples, 512).ranks))
            for examples in (1, 8, 9, 64, 70, 140)
        ]
        assert sizes == [1, 1, 2, 8, 16, 32]
        with pytest.raises(ArgumentError, match="a batch of 512 has no groups of 600 examples"):
            ChipGroups.for_examples(plan, 600, 512)

    def test_invalid_groups(self, plan):
        with pytest.raises(ArgumentError, match="each at most once"):
            ChipGroups(((0, 1), (1, 2)), 4)
        with pytest.raises(CollectiveError, match="axis 'data' has 12 ranks, and the groups are"):
            on_one_device(lambda x: ChipGroups.of_size(plan, 4).sum(x, "data"))(np.ones(12))


class Net(nn.Module):
    """A convolution's worth of channels, normalized."""

    norm: type = GroupBatchNorm

    @nn.compact
    def __call__(self, x, train=True, **options):
        x = nn.Dense(5)(x)
        return jnp.tanh(self.norm(name="norm")(x, use_running_average=not train, **options))


BATCH = 200  # on 60 chips: some have four examples, most have three and one of padding


@pytest.fixture(scope="module")
def case(plan):
    groups = ChipGroups.of_size(plan, 16)
    assert sorted(map(len, groups.ranks)) == [12, 16, 16, 16]
    shares = BatchShares.for_ranks(plan, BATCH)
    x = 3 + np.random.default_rng(0).normal(size=(BATCH, 2, 2, 3)).astype(np.float32)
    net = Net(partial(GroupBatchNorm, groups=groups, axis_name="data"))
    return groups, shares, x, net, net.init(jax.random.key(0), x[:1])


def one_device(case):
    """Loss, gradient and running statistics of each group's examples, by Flax's own."""
    groups, shares, x, _, variables = case
    net = Net(partial(nn.BatchNorm, momentum=0.9))
    positions = [shares.positions()[list(group)] for group in groups.ranks]
    members = [rows[rows >= 0] for rows in positions]

    def loss(params):
        total, stats = 0, []
        for rows in members:
            y, new = net.apply({**variables, "params": params}, x[rows], mutable="batch_stats")
            total += jnp.sum(y**3)
            stats.append(new["batch_stats"]["norm"])
        return total / BATCH, stats

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return value, grads, stats


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_and_statistics_of_groups(case, plan, check_vma):
    groups, shares, x, net, variables = case
    images, weights = shares.pad_batch(x)
    images[weights == 0] = 1e3  # what padding holds must not matter

    def step(variables, images, weights):
        def loss(params):
            params = with_mean_gradients(params, "data", plan=plan)
            y, new = net.apply(
                {**variables, "params": params}, images, weights=weights, mutable="batch_stats"
            )
            part = shares.mean_contribution(jnp.sum(y**3, axis=(1, 2, 3)), weights)
            return part, new["batch_stats"]

        (part, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        every = mean_batch_stats(stats, "data", plan=plan)
        return plan.pmean(part, "data"), grads, stats, every

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=plan.jax_mesh("data"),
            in_specs=(P(), P("data"), P("data")),
            out_specs=(P(), P(), P("data"), P()),
            check_vma=check_vma,
        )
    )
    value, grads, stats, every = jax.device_get(run(variables, images, weights))
    want_value, want_grads, want_stats = one_device(case)
    np.testing.assert_allclose(value, want_value, rtol=1e-4)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(close, grads, want_grads)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for name in ("mean", "var"):
        of_rank = stats["norm"][name].reshape(60, 5)
        for group, want in zip(groups.ranks, want_stats, strict=True):
            close(of_rank[list(group)], np.tile(want[name], (len(group), 1)))
        close(every["norm"][name], of_rank.mean(axis=0))


class TestModule:
    """Alone on one device it is Flax's, in the same collections."""

    x = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32) * 2 + 1

    def both(self, **options):
        return (
            GroupBatchNorm(momentum=0.9, **options),
            nn.BatchNorm(momentum=0.9, **options),
        )

    @pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
    def test_matches_flax(self, dtype):
        x = self.x if dtype is None else self.x.astype(dtype)
        results = []
        for module in self.both(dtype=dtype):
            variables = module.init(jax.random.key(0), x, use_running_average=False)
            y, new = module.apply(variables, x, use_running_average=False, mutable="batch_stats")
            z = module.apply({**variables, **new}, x, use_running_average=True)
            results.append((variables, y, new, z))
        assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
        tolerance = 1e-5 if dtype is None else 2**-6
        for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(
                ours.astype(np.float32), theirs.astype(np.float32), rtol=tolerance, atol=tolerance
            )

    def test_without_scale_and_bias(self):
        module = GroupBatchNorm(False, use_scale=False, use_bias=False)
        variables = module.init(jax.random.key(0), self.x)
        assert list(variables) == ["batch_stats"]
        y, _ = module.apply(variables, self.x, mutable="batch_stats")
        assert abs(y.mean()) < 1e-6
        assert abs(y.var() - 1) < 1e-3

    def test_wrong_number_of_weights(self):
        module = GroupBatchNorm(use_running_average=False)
        with pytest.raises(ArgumentError, match="weights of shape \\(5,\\) for 6 examples"):
            module.init(jax.random.key(0), self.x, weights=jnp.ones(5))

    def test_groups_need_an_axis(self):
        module = GroupBatchNorm(use_running_average=False, groups=ChipGroups(((0,),), 1))
        variables = module.init(jax.random.key(0), self.x)
        with pytest.raises(ArgumentError, match="give axis_name too"):
            module.apply(variables, self.x, mutable="batch_stats")
