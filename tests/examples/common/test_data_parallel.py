"""Sums over the devices of a run: on a plan, by psum, and with idle devices."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from examples.common import data_parallel
from examples.common.data_parallel import DataParallel
from ftmesh import PlanError, Topology
from ftmesh.collectives import BatchShares
from ftmesh.errors import CollectiveError
from ftmesh.nn import ChipGroups
from ftmesh.testing import cpu_grid
from ftmesh.topology.ranks import Ranks

pytestmark = pytest.mark.usefixtures("quick_compiler")

TWO_ON_A_CHIP = Topology((1,), (False,), devices_per_chip=2)
DISCONNECTED = Topology.from_drawing("..X..\n..X..")  # has no plan
HOLE = Topology.grid("4x4", failed="2x2@0,0")


@dataclass(frozen=True)
class Tpu:
    """A fake device of a v6e."""

    id: int
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


@pytest.mark.parametrize(
    ("options", "executor"),
    [({}, "xla"), ({"reduce_scatter": True}, "xla"), ({"overlap": True}, "ppermute")],
)
def test_auto_leaves_sums_to_xla_unless_they_overlap(options, executor, monkeypatch):
    monkeypatch.setattr(data_parallel, "jax_mesh", lambda *args, **options: None)
    topology = Topology.from_devices([Tpu(n) for n in range(16)], shape="4x4", failed="2x2@0,0")
    plan = DataParallel.create(topology, executor="auto", **options).plan
    assert plan.executor == executor
    if options:
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
        (DISCONNECTED, "psum"),
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


def test_a_disconnected_mesh_has_no_plan():
    with pytest.raises(PlanError):
        DataParallel.create(DISCONNECTED)


@pytest.mark.parametrize("topology", [HOLE, cpu_grid("4x4", failed="2x2@0,0")])
def test_idle_devices_do_not_count_on_psum(topology):
    parallel = DataParallel.create(topology, "psum", with_idle=True)
    x = np.full(16, np.nan, np.float32)  # idle devices may hold anything
    x[parallel.ranks.live] = np.arange(12)
    assert sum_and_mean(parallel, x) == [66.0, 5.5]
    assert "with idle devices" in parallel.sums_description


def test_small_sums_take_fewer_rounds():
    parallel = DataParallel.create(Topology.grid("8x8", failed="2x2@2,2"), "ring")
    assert (parallel.plan.algorithm, parallel.small_plan.algorithm) == ("ring", "tree")
    assert parallel.small_plan.schedule.num_rounds < parallel.plan.schedule.num_rounds
    x = np.arange(60, dtype=np.float32)
    assert sum_and_mean(parallel, x) == [x.sum(), pytest.approx(x.mean())]
    optimizer = parallel.optimizer(optax.sgd(1.0))
    comm = optimizer.comm
    assert (comm.plan, comm.norm_plan) == (parallel.plan, parallel.small_plan)


def test_one_plan_if_it_is_best_for_both():
    parallel = DataParallel.create(HOLE, "tree")
    assert parallel.small_plan is parallel.plan


@pytest.mark.parametrize(
    ("topology", "why"), [(HOLE, "lax.psum does not"), (Topology.grid("1x1"), "single")]
)
def test_only_a_plan_overlaps(topology, why):
    with pytest.raises(CollectiveError, match=why):
        DataParallel.create(topology, "psum", overlap=True)


class TestRanks:
    """The ranks of a topology are those of a plan."""

    @pytest.mark.parametrize("devices_per_chip", [1, 2])
    @pytest.mark.parametrize("with_idle", [False, True])
    def test_of_the_program(self, devices_per_chip, with_idle):
        topology = replace(HOLE, devices_per_chip=devices_per_chip)
        parallel = DataParallel.create(topology, with_idle=with_idle)
        ranks, program = Ranks.from_plan(parallel.plan), parallel.plan.program
        assert ranks == parallel.ranks
        assert ranks.live.tolist() == program.live.tolist()
        assert (ranks.num_ranks, ranks.num_live) == (program.num_ranks, len(program.live))

    def test_shares_and_groups_of_a_topology(self):
        assert BatchShares.for_ranks(DISCONNECTED, 12).counts().tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
        assert BatchShares.for_ranks(TWO_ON_A_CHIP, 3).counts().tolist() == [2, 1]
        (group,) = ChipGroups.of_size(DISCONNECTED, 10).ranks
        assert sorted(group) == list(range(8))
        assert ChipGroups.of_size(TWO_ON_A_CHIP, 1).ranks == ((0, 1),)
        counts = BatchShares.for_ranks(Ranks(HOLE, with_idle=True), 12).counts()
        assert counts.tolist() == [1] * 12 + [0] * 4


@pytest.mark.parametrize("options", [{"overlap": True}, {"reduce_scatter": True}])
def test_the_description_names_the_plan_of_gradients(options):
    """Trees have no reduce-scatter, so another algorithm replaces them."""
    all_reduce = DataParallel.create(HOLE, "tree")
    reduce_scatter = DataParallel.create(HOLE, "tree", **options)
    assert all_reduce.sums_description.startswith("tree on 4x4")
    assert reduce_scatter.plan.algorithm == "tree"
    plan = reduce_scatter.gradients_plan
    assert plan.algorithm == reduce_scatter.plan.with_reduce_scatter.algorithm != "tree"
    assert reduce_scatter.sums_description.startswith(f"{plan.algorithm} on 4x4")
