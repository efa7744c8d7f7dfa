"""Sums of a run: on a plan, on psum where there is none, and on devices that are idle."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from examples.common.data_parallel import DataParallel
from ftmesh import PlanError, Topology
from ftmesh.collectives import BatchShares
from ftmesh.errors import CollectiveError
from ftmesh.nn import ChipGroups
from ftmesh.testing import cpu_grid
from ftmesh.topology.ranks import Ranks

pytestmark = pytest.mark.usefixtures("quick_compiler")

TWO_ON_A_CHIP = Topology((1,), (False,), devices_per_chip=2)
SPLIT_IN_TWO = Topology.from_drawing("..X..\n..X..")  # no plan: the halves are not joined
HOLE = Topology.grid("4x4", failed="2x2@0,0")


@dataclass(frozen=True)
class Tpu:
    """A device of a v6e that is not there."""

    id: int
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


@pytest.mark.parametrize(
    ("how", "executor"),
    [({}, "pallas"), ({"halved": True}, "pallas"), ({"overlap": True}, "ppermute")],
)
def test_a_kernel_by_price_also_where_gradients_go_to_owners(how, executor, monkeypatch):
    """Nothing else is computed while it runs, so not where that is asked for."""
    monkeypatch.setattr(Topology, "jax_mesh", lambda *args, **options: None)
    topology = Topology.from_devices([Tpu(n) for n in range(16)], shape="4x4", failed="2x2@0,0")
    plan = DataParallel.create(topology, executor="auto", **how).plan
    assert plan.executor == executor
    if how:
        assert plan.with_reduce_scatter is plan


def sum_and_mean(parallel, x):
    run = parallel.jit(
        lambda x: (parallel.sum(x[0]), parallel.mean(x[0])), in_specs=(P("data"),), out_specs=P()
    )
    return [float(value) for value in run(x)]


@pytest.mark.parametrize(
    ("topology", "algorithm"),
    [
        (TWO_ON_A_CHIP, "auto"),
        (replace(TWO_ON_A_CHIP, devices=tuple(jax.devices()[:2])), "auto"),
        (Topology.grid("2x1"), "psum"),
        (cpu_grid("2x1"), "psum"),
        (SPLIT_IN_TWO, "psum"),
        (cpu_grid("5x2", failed="1x2@2,0"), "psum"),
        (Topology.grid("1x1"), "auto"),
        (cpu_grid("1x1"), "ring"),
        (HOLE, "psum"),
        (HOLE, "ring"),
    ],
)
def test_every_live_device_counts_once(topology, algorithm):
    parallel = DataParallel.create(topology, algorithm)
    assert (parallel.plan is None) == (algorithm == "psum" or topology.num_live == 1)
    x = 3.0 * np.arange(1, parallel.num_ranks + 1, dtype=np.float32)
    assert sum_and_mean(parallel, x) == [x.sum(), pytest.approx(x.mean())]


def test_a_chip_with_two_devices_has_the_mean_of_both():
    assert sum_and_mean(DataParallel.create(TWO_ON_A_CHIP), np.array([1.5, 7.5])) == [9.0, 4.5]


def test_what_psum_does_without_a_plan_does_not():
    with pytest.raises(PlanError):
        DataParallel.create(SPLIT_IN_TWO)


@pytest.mark.parametrize("topology", [HOLE, cpu_grid("4x4", failed="2x2@0,0")])
def test_idle_devices_do_not_count_on_psum(topology):
    parallel = DataParallel.create(topology, "psum", with_idle=True)
    x = np.full(16, np.nan, np.float32)  # which is what an idle device may have
    x[parallel.ranks.live] = np.arange(12)
    assert sum_and_mean(parallel, x) == [66.0, 5.5]
    assert "with idle devices" in parallel.sums_description


def test_small_sums_go_where_they_take_few_rounds():
    parallel = DataParallel.create(Topology.grid("8x8", failed="2x2@2,2"), "ring")
    assert (parallel.plan.algorithm, parallel.small_plan.algorithm) == ("ring", "row_pair")
    assert parallel.small_plan.schedule.num_rounds < parallel.plan.schedule.num_rounds
    x = np.arange(60, dtype=np.float32)
    assert sum_and_mean(parallel, x) == [x.sum(), pytest.approx(x.mean())]
    optimizer = parallel.optimizer(optax.sgd(1.0))
    comm = optimizer.ops.comm
    assert (comm.plan, comm.norm_plan) == (parallel.plan, parallel.small_plan)


def test_one_plan_where_it_is_best_for_both():
    parallel = DataParallel.create(HOLE, "row_pair")
    assert parallel.small_plan is parallel.plan


@pytest.mark.parametrize(
    ("topology", "why"), [(HOLE, "JAX's own"), (Topology.grid("1x1"), "single")]
)
def test_only_a_plan_overlaps(topology, why):
    with pytest.raises(CollectiveError, match=why):
        DataParallel.create(topology, "psum", overlap=True)


class TestRanks:
    """As a plan has them, without one."""

    @pytest.mark.parametrize("devices_per_chip", [1, 2])
    @pytest.mark.parametrize("with_idle", [False, True])
    def test_they_are_those_of_the_program(self, devices_per_chip, with_idle):
        topology = replace(HOLE, devices_per_chip=devices_per_chip)
        parallel = DataParallel.create(topology, with_idle=with_idle)
        ranks, program = Ranks.from_plan(parallel.plan), parallel.plan.program
        assert ranks == parallel.ranks
        assert ranks.live.tolist() == program.live.tolist()
        assert (ranks.num_ranks, ranks.num_live) == (program.num_ranks, len(program.live))

    def test_shares_and_groups_of_a_topology(self):
        assert BatchShares.for_ranks(SPLIT_IN_TWO, 12).counts().tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
        assert BatchShares.for_ranks(TWO_ON_A_CHIP, 3).counts().tolist() == [2, 1]
        assert ChipGroups.of_size(SPLIT_IN_TWO, 10).ranks == (tuple(range(8)),)
        assert ChipGroups.of_size(TWO_ON_A_CHIP, 1).ranks == ((0, 1),)
        assert BatchShares.for_ranks(Ranks(HOLE, with_idle=True), 12).counts().tolist() == [
            *(0, 0, 1, 1), *(0, 0, 1, 1), *(1, 1, 1, 1), *(1, 1, 1, 1),
        ]  # fmt: skip


@pytest.mark.parametrize("how", [{"overlap": True}, {"halved": True}])
def test_what_gradients_go_by_is_said(how):
    """Trees have no halves, so that others stand in for them."""
    whole, by_halves = (
        DataParallel.create(Topology.grid("4x4", failed="2x2@0,0"), "tree", **each)
        for each in ({}, how)
    )
    assert whole.sums_description.startswith("tree on 4x4")
    assert by_halves.plan.algorithm == "tree"
    found = by_halves.gradients_plan
    assert found.algorithm == by_halves.plan.with_reduce_scatter.algorithm != "tree"
    assert by_halves.sums_description.startswith(f"{found.algorithm} on 4x4")
