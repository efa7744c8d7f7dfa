"""The device model: its arithmetic, and where it is taken into account."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import ftmesh
from ftmesh import ArgumentError, Topology
from ftmesh.algorithms import registry
from ftmesh.cli import paper
from ftmesh.cli.main import main
from ftmesh.cost.device_model import DeviceModel, RoundLoad, round_load
from ftmesh.cost.executors import lax_psum_seconds
from ftmesh.cost.links import DEFAULT, NETWORKS, parse_network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import MODES, Simulator
from ftmesh.execute.lowering import lower
from ftmesh.planning import advise
from ftmesh.planning.chunking import schedule_for, tree_lower_bound
from ftmesh.planning.selection import select_algorithm
from ftmesh.schedule.transfers import make_transfers
from ftmesh.topology.tiles import TiledTopology
from tests.support.trees import tree_schedule

V6E = Topology.grid("16x16", failed="2x2@2,2")  # 252 live chips
V3 = Topology.grid("16x32", failed="4x2@6,14")  # 504
PAYLOAD = 100_000_000
DEVICE_MODEL = DeviceModel(500, 2000, 0.004, packing=0.01, clock=2e9)
TWO_CORES = replace(DEVICE_MODEL, devices=2)


def seconds(topology, algorithm, device_model, mode="synchronous", payload=PAYLOAD):
    network = replace(DEFAULT, device_model=device_model)
    return Simulator(registry.build_schedule(topology, algorithm)).seconds(payload, network, mode)


# Arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("topology", "n"), [(V6E, 252), (V3, 504)])
def test_ring_formula(topology, n, mode):
    a_round = (500 + 2 * 2000 + 0.004 * PAYLOAD / n) / 2e9
    wires = DEFAULT.latency + PAYLOAD / (2 * n * DEFAULT.bandwidth)
    expected = 2 * (n - 1) * (wires + a_round) + 0.01 * PAYLOAD / 2e9
    assert seconds(topology, "ring", DEVICE_MODEL, mode) == pytest.approx(expected, rel=1e-12)


def test_two_cores_carry_and_exchange_halves():
    a_round = (500 + 2 * 2000 + 0.004 * PAYLOAD / 504 / 2) / 2e9
    exchange = (4 * (500 + 2000) + 0.004 * PAYLOAD / 2) / 2e9
    wires = DEFAULT.latency + PAYLOAD / (2 * 504 * DEFAULT.bandwidth)
    expected = 2 * 503 * (wires + a_round) + 2 * exchange + 0.01 * PAYLOAD / 2e9
    assert seconds(V3, "ring", TWO_CORES) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("topology", "rounds", "chunks", "num_chunks"),
    [(V6E, (32, 6), 4 * 7, 448), (V3, (32, 14), 4 * 15, 960)],
)
def test_row_pair_rounds(topology, rounds, chunks, num_chunks):
    along, across = (
        (500 + 4 * 2000 + 0.004 * moved * PAYLOAD / num_chunks) / 2e9 for moved in (chunks, 4)
    )
    expected = 2 * (rounds[0] * along + rounds[1] * across) + 0.01 * PAYLOAD / 2e9
    devices = seconds(topology, "row_pair", DEVICE_MODEL) - seconds(topology, "row_pair", None)
    assert devices == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("mesh", "failed"),
    [("8x8", ""), ("8x8", "2x2@2,2"), ("6x10", "2x4@2,4"), ("1x8", ""), ("16x16", "3x3@1,1")],
)
@pytest.mark.parametrize("cores", [1, 2])
def test_lanes_are_those_of_the_lowered_program(mesh, failed, cores):
    topology = Topology.grid(mesh, failed=failed)
    found = [
        one
        for one in registry.try_algorithms(topology).values()
        if isinstance(one, ftmesh.Schedule)
    ]
    for schedule in found:
        loops = lower(schedule, devices_per_chip=cores).loops
        counts = [[lane.count for lane in loop.lanes] for loop in loops]
        lowered = [RoundLoad(len(lanes), sum(lanes)) for lanes in counts]
        modelled = [round_load(phase) for phase in schedule.phases]
        assert modelled == (lowered if cores == 1 else lowered[1:-1])
        if cores == 2:  # which `setup_seconds` assumes
            for loop, load in ((loops[0], lowered[0]), (loops[-1], lowered[-1])):
                assert (load.lanes, load.chunks * loop.num_rounds) == (1, schedule.num_chunks)


@pytest.mark.parametrize(("mesh", "failed"), [("4x4", "1x1@0,0;1x1@2,1"), ("3x3x2", "")])
def test_lanes_of_trees_are_directions(mesh, failed):
    schedule = tree_schedule(Topology.grid(mesh, failed=failed), 6)
    (loop,) = lower(schedule).loops
    directions = 2 * len(schedule.topology.shape)
    assert round_load(schedule.phases[0]) == RoundLoad(directions, directions)
    assert len(loop.lanes) == directions


def test_lanes_that_are_no_permutations():
    # The lanes of the rows are no permutations over all rounds; three pairs leave rank 0.
    rows = make_transfers(
        round=[0, 1, 2, 3, 3], lane=[0, 0, 0, 0, 1], src=[0, 0, 0, 1, 1], dst=[1, 2, 3, 0, 0],
        chunk=[0, 0, 0, 0, 1],
    )  # fmt: skip
    phase = ftmesh.Phase("star", rows)
    assert round_load(phase) == RoundLoad(3, 3)


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
@pytest.mark.parametrize("payload", [10_000, PAYLOAD])
def test_dataflow_is_between_the_wires_and_synchronous(algorithm, payload):
    topology = Topology.grid("8x8", failed="4x2@2,2")
    schedule = registry.build_schedule(topology, algorithm)
    round_seconds, _ = DEVICE_MODEL.schedule_seconds(schedule, payload)
    rounds = [phase.num_rounds for phase in schedule.phases]
    devices = sum(n * seconds for n, seconds in zip(rounds, round_seconds, strict=True))
    synchronous, dataflow = (
        seconds(topology, algorithm, DEVICE_MODEL, mode, payload) for mode in MODES
    )
    wires = seconds(topology, algorithm, None, "dataflow", payload)
    assert max(wires, devices) < dataflow <= synchronous * (1 + 1e-12)


@pytest.mark.parametrize("mesh", ["2x1", "1x3"])
@pytest.mark.parametrize("generation", ["v3", "v6e"])
@pytest.mark.parametrize("payload", [100_000, 4_000_000_000])
def test_trees_of_few_chips_take_no_less_than_their_bound(mesh, generation, payload):
    topology, network = Topology.grid(mesh), NETWORKS[generation]
    schedule = schedule_for(topology, "tree", payload, network)
    seconds = Simulator(schedule).seconds(payload, network)
    assert tree_lower_bound(topology, payload, network) <= seconds


def test_trees_on_v3_take_no_less_than_their_bound():
    network = NETWORKS["v3"]
    fastest = select_algorithm(V3, PAYLOAD, network).candidates[0]
    assert fastest.algorithm == "tree"
    assert tree_lower_bound(V3, PAYLOAD, network) < fastest.seconds


def test_every_device_of_a_tile_has_a_payload():
    tiles = TiledTopology.from_topology(Topology.grid("8x8"), "2x2")
    found = [
        seconds(tiles, "ring", device_model) - seconds(tiles, "ring", None)
        for device_model in (DEVICE_MODEL, TWO_CORES)
    ]
    a_round = (500 + 2 * 2000 + 0.004 * PAYLOAD / 16) / 2e9
    assert found == [pytest.approx(30 * a_round + 0.01 * PAYLOAD / 2e9, rel=1e-9)] * 2


# Where it is taken into account ------------------------------------------------------------------


def test_generations_have_a_device_model_and_rates_do_not():
    assert parse_network("v3") is NETWORKS["v3"]
    for name in ("v3", "v6e"):
        device_model = NETWORKS[name].device_model
        assert "estimated by the TPU compiler" in device_model.source
        wires = parse_network(name).wires_only
        assert wires == replace(
            NETWORKS[name], device_model=None, collective_launch=0.0, all_reduce_efficiency=1.0,
            spread=None,
        )  # fmt: skip
    assert NETWORKS["v3"].device_model.devices == 2
    assert parse_network("82GB/s").device_model is None
    assert DEFAULT.wires_only == DEFAULT


@pytest.mark.parametrize(
    ("kind", "name"), [("TPU v3", "v3"), ("TPU v6 lite", "v6e"), ("TPU v4", "v4")]
)
def test_plans_for_tpus_use_their_network(kind, name):
    devices = [SimpleNamespace(coords=(x, y, 0), device_kind=kind) for y in (0, 1) for x in (0, 1)]
    topology = Topology.from_devices(devices, failed="")
    assert ftmesh.plan(topology).network is NETWORKS[name]
    assert ftmesh.plan(topology, link="50GB/s").network.device_model is None


@pytest.mark.parametrize("kind", ["cpu", "TPU v99", "NVIDIA H100"])
def test_plans_for_other_devices_use_the_default_network(kind):
    devices = [SimpleNamespace(coords=(x, 0, 0), device_kind=kind) for x in range(4)]
    assert ftmesh.plan(Topology.from_devices(devices, failed="")).network is DEFAULT
    assert ftmesh.plan(Topology.grid("2x2")).network is DEFAULT


def test_a_simulation_has_both_times():
    network = replace(DEFAULT, device_model=DEVICE_MODEL)
    found = Simulator(registry.build_schedule(V6E, "row_pair")).run(PAYLOAD, network)
    assert found.wires_seconds == seconds(V6E, "row_pair", None)
    assert found.setup_seconds == 0.01 * PAYLOAD / 2e9
    assert found.phases[-1].end == pytest.approx(found.seconds - found.setup_seconds)
    assert "500 cycles a round, 2,000 cycles a lane, 4 a kB besides the wires, at 2 GHz" in str(
        found
    )
    assert f"on the wires alone: {1e3 * found.wires_seconds:.3g} ms" in str(found)


def test_device_time_changes_the_selection():
    """Fastest on the wires is two_dim, which has twice the lanes of a ring."""
    topology = Topology.grid("8x8")
    wires, run = (
        select_algorithm(
            topology,
            PAYLOAD,
            replace(DEFAULT, device_model=device_model),
            reduce_scatter=True,
        )
        for device_model in (None, DEVICE_MODEL)
    )
    assert (wires.algorithm, run.algorithm) == ("two_dim", "ring")
    by_name = {one.algorithm: one for one in run.candidates}
    for one in wires.candidates[:3]:
        assert by_name[one.algorithm].wires_seconds == one.seconds
        assert one.wires_seconds is None
    assert "wires alone" in str(run)
    assert "wires alone" not in str(wires)


def test_with_device_time_auto_selects_trees():
    """They have the fewest rounds; a reduce-scatter and unrolled rounds do without them."""
    topology, network = Topology.grid("8x8"), replace(DEFAULT, device_model=DEVICE_MODEL)
    plan = ftmesh.plan(topology, payload_bytes=PAYLOAD, link=network, executor="ppermute")
    candidates = plan.explain().candidates
    assert [one.name for one in candidates[:2]] == ["ring, xla", "tree"]
    assert plan.algorithm == "tree"
    assert (plan.with_reduce_scatter.algorithm, plan.unrolled_variant.algorithm) == ("ring", "ring")
    unrolled = ftmesh.plan(
        topology, payload_bytes=PAYLOAD, link=network, executor="ppermute_unrolled"
    )
    assert unrolled.algorithm == "ring"
    assert unrolled.for_payload(PAYLOAD // 64).algorithm != "tree"
    on_wires = ftmesh.plan(topology, payload_bytes=PAYLOAD, link=network, executor="pallas")
    assert (on_wires.algorithm, on_wires.network.device_model) == ("tree", None)
    named = ftmesh.plan(topology, "tree", payload_bytes=PAYLOAD, executor="pallas")
    assert "tree" in [one.algorithm for one in named.explain().candidates if not one.rejection]


def test_lower_bounds_of_wires_and_devices(capsys):
    expected = pytest.approx((0.004 + 0.01) * PAYLOAD / 2e9)
    assert DEVICE_MODEL.lower_bound_seconds(PAYLOAD) == expected
    for device_model in (DEVICE_MODEL, TWO_CORES):
        assert device_model.lower_bound_seconds(PAYLOAD) < seconds(V6E, "ring", device_model)
    found = limits(V6E)
    network = NETWORKS["v6e"]
    assert found.all_reduce_seconds(PAYLOAD, network) == found.all_reduce_seconds(
        PAYLOAD, network.wires_only
    )
    command = ["limits", "16x16", "--failed", "2x2@2,2", "--tpu", "v6e", "--json"]
    both = []
    for argv in (command, [*command, "--wires-only"]):
        assert main(argv) == 0
        both.append(json.loads(capsys.readouterr().out))
    floor = 1e6 * network.device_model.lower_bound_seconds(PAYLOAD)
    assert both[0].pop("executor_floor_us") == pytest.approx(floor)
    assert both[0] == both[1]


@pytest.mark.slow
def test_simulate_prints_both_times_or_the_wires_alone(capsys):
    command = ["simulate", "8x8", "--failed", "2x2@2,2", "--tpu", "v6e", "--algorithm", "ring"]
    found = []
    for more in (["--json"], ["--json", "--wires-only"]):
        assert main([*command, *more]) == 0
        found += json.loads(capsys.readouterr().out)
    run, wires = found
    assert run["wires_us"] == wires["wires_us"] == wires["time_us"] < run["time_us"]
    assert run["limit_us"] == wires["limit_us"]
    assert wires["around_us"] == 0 < run["around_us"]
    main(["simulate", "8x8", "--failed", "2x2@2,2", "--tpu", "v6e"])
    text = capsys.readouterr().out
    assert "wires alone" in text.splitlines()[1]
    assert f"  devices: {NETWORKS['v6e'].device_model}; " in text


def test_advice_counts_device_time():
    job = advise.TrainingJob(
        Topology.grid("8x8", failed=""), mtbf=1.0, repair_time=1.0, checkpoint_interval=1.0,
        step_time=0.02,
        network=replace(DEFAULT, device_model=DEVICE_MODEL),
    )  # fmt: skip
    in_permutations = seconds(job.topology, "two_dim", DEVICE_MODEL)
    native = lax_psum_seconds(job.topology, job.payload_bytes, DEFAULT)  # no device time
    assert job.full_all_reduce_seconds == pytest.approx(native)
    assert native < in_permutations


def test_advice_prints_both_speeds(capsys):
    text = "advise 8x8 --failed 2x2@2,2 --tpu v3 --runs 1 --horizon 10d --step 20ms"
    command = text.split()
    assert main(command) == 0
    assert "% on the wires alone)" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["at_hand"]
    assert found["wires_speeds"]["fault-tolerant"] != found["speeds"]["fault-tolerant"]


def test_the_papers_runs_with_a_device_model():
    options = {"rates": (82e9,), "modes": ("synchronous",)}
    run = paper.RUNS[0]
    (wires,), (as_run,) = (
        paper.simulate_runs(**options, device_model=device_model)[run]
        for device_model in (None, TWO_CORES)
    )
    assert as_run.full == pytest.approx(
        Simulator(registry.build_schedule(run.topologies[0], "two_dim")).seconds(
            run.payload_bytes, replace(wires.network, device_model=TWO_CORES)
        )
    )
    assert as_run.full > wires.full


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"per_lane": -1.0}, "per_lane must be 0 cycles or more, not -1.0"),
        ({"packing": float("nan")}, "packing must be 0 cycles or more"),
        ({"clock": 0.0}, "clock must be above 0 cycles per second"),
        ({"devices": 3}, "a chip has one or two devices, not 3"),
    ],
)
def test_impossible_models_are_rejected(changes, says):
    with pytest.raises(ArgumentError, match=says):
        replace(DEVICE_MODEL, **changes)
