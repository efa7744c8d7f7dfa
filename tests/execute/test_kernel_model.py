"""The Pallas kernel in every order of its events: no deadlock, no slot overwritten too early."""

import random
from functools import partial
from itertools import product

import numpy as np
import pytest

from ftmesh import Topology
from ftmesh.algorithms import registry
from ftmesh.execute import pallas_tables
from ftmesh.execute.lowering import MIXED, lower
from ftmesh.execute.pallas_rank import KernelLane, KernelRank
from ftmesh.execute.pallas_tables import PAGE_ROUNDS, SLOTS
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import COPY
from tests.support.kernel_faults import PLANT
from tests.support.kernel_model import DeadlockError, EndError, Model, RaceError
from tests.support.kernel_recorder import record
from tests.support.more import more, more_case
from tests.support.pallas_programs import crossing_loop, make_program

slow = pytest.mark.slow
FAULTS = (RaceError, DeadlockError, EndError)
OPERATIONS = "all_reduce", "reduce_scatter", "all_gather"
PAIR, SQUARE = Topology.grid("2x1"), Topology.grid("2x2")
SMALL = {
    "2x3 less one": Topology.grid("2x3", failed="1x1@0,0"),
    "3x3 less one": Topology.grid("3x3", failed="1x1@1,1"),
    "3x3 less a corner": Topology.grid("3x3", failed="1x1@0,0"),
    "a ring of 5": Topology.grid("5", wrap=(True,)),
}
HOLE = Topology.grid("4x4", failed="2x2@2,2")
LARGE = Topology.grid("8x8", failed="2x2@2,2")


def programs(topology, *, num_chunks=(1, 2, 6), lags=(0, 1, 3)):
    """The programs of every algorithm that works on a mesh, by name."""
    schedules = registry.try_algorithms(topology)
    schedules["flood"] = registry.build_schedule(topology, "flood")
    for num in num_chunks:
        for lag in lags:
            name = f"tree of {num} chunks, lag {lag}"
            schedules[name] = registry.build_schedule(topology, "tree", num, lag=lag)
    return {name: lower(s) for name, s in schedules.items() if isinstance(s, Schedule)}


def tree(topology, num_chunks, **options):
    return lower(registry.build_schedule(topology, "tree", num_chunks, **options))


def crossing(num_rounds, **options):
    loop = crossing_loop(num_rounds, num_ranks=2, **{"lanes": (1,)} | options)
    return make_program([loop], (2, 1))


def model_of(program, operation="all_reduce", *, chunk_rows=1, **options):
    """The model of an operation, which checks its sums."""
    loops = program.loops if operation == "all_reduce" else getattr(program, operation)
    recorded = record(program, loops, chunk_rows=chunk_rows, **options)
    owners = () if program.owner is None else np.repeat(program.owner, chunk_rows).tolist()
    return Model(recorded, checks=operation, owners=owners, live=program.live.tolist())


def prove_all(topology, operations=OPERATIONS, **options):
    """Prove every operation of every algorithm on a mesh: what was counted."""
    return {
        (name, operation): model_of(program, operation, **options).prove()
        for name, program in programs(topology).items()
        for operation in operations
        if operation == "all_reduce" or program.reduce_scatter
    }


def total(counts, key):
    return sum(count[key] for count in counts.values())


def test_every_order_on_a_square():
    counts = prove_all(SQUARE)
    algorithms = {name for name, operation in counts if operation == "all_gather"}
    assert algorithms == {"ring", "two_dim", "row_pair", "chain", "flood"}
    assert (len(counts), total(counts, "held")) == (24, 3_758)
    ring = counts["ring", "all_reduce"]
    assert ring["held"] > 200
    assert ring["run"] > 50 * ring["held"]
    both = (counts["ring", "reduce_scatter"], counts["ring", "all_gather"])
    assert ring["held"] < sum(count["held"] for count in both) < 2 * ring["held"]


def test_every_order_of_pieces():
    prove_all(SQUARE, ("reduce_scatter", "all_gather"), chunk_rows=3)


def test_every_order_of_casts():
    prove_all(SQUARE, ("reduce_scatter",), wire=np.float16)


@slow
@pytest.mark.parametrize("options", [{"chunk_rows": 3}, {"wire": np.float16}], ids=str)
def test_every_order_of_pieces_and_casts_along_trees(options):
    prove_all(SQUARE, ("all_reduce",), **options)


def test_every_order_of_a_16_bit_sum():
    """Partial sums are cast for the wire; the results, rounded in between, are not."""
    for program in programs(SQUARE, num_chunks=()).values():
        halves = (
            record(program, program.reduce_scatter, wire=np.float16),
            record(program, program.all_gather),
        )
        Model([a + b for a, b in zip(*halves, strict=True)]).prove()


def test_every_order_of_two_calls():
    """No partner mistakes the barrier of the second call for that of the first."""
    for program in programs(SQUARE, num_chunks=(2,)).values():
        Model(record(program), calls=2).prove()


@more
@slow
@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_kernels_that_share_a_barrier(name):
    """Whatever the partners: every rank owns a chunk, so none finishes before all have started."""
    kernels = {}
    for program in programs(SMALL[name], num_chunks=(1, 2), lags=(0,)).values():
        kernels.setdefault("all-reduce", []).append(record(program))
        if program.owner is not None:
            assert len(set(program.owner.tolist())) == program.num_ranks
            kernels.setdefault("reduce-scatter", []).append(record(program, program.reduce_scatter))
            kernels.setdefault("all-gather", []).append(record(program, program.all_gather))
    for recorded in kernels.values():
        for first, second in product(recorded, repeat=2):
            both = [a + b for a, b in zip(first, second, strict=True)]
            Model(both, checks="").prove()


@pytest.mark.parametrize(
    ("program", "num_states"),
    [
        (tree(PAIR, 2), 8_420),
        (tree(SQUARE, 1), 2_852),
        (crossing(2 * SLOTS), 1_968),
    ],
    ids=["two ranks", "a square", "a crossing"],
)
def test_all_states(program, num_states):
    model = Model(record(program), checks="")
    assert model.explore(max_states=num_states) == num_states
    model.prove()


@pytest.mark.parametrize(
    ("operation", "wire", "num_states"),
    [
        ("reduce_scatter", np.float32, 148),
        ("reduce_scatter", np.float16, 244),
        ("all_gather", np.float32, 53),
        ("all_reduce", np.float32, 201),
    ],
)
def test_all_states_of_every_operation(operation, wire, num_states):
    model = model_of(lower(registry.build_schedule(PAIR, "chain")), operation, wire=wire)
    assert model.explore(max_states=num_states) == num_states
    model.prove()


@slow
def test_all_states_of_an_all_gather_between_ranks():
    model = model_of(lower(registry.build_schedule(SQUARE, "ring")), "all_gather")
    assert model.explore(max_states=16_651, eager_local=True) == 16_651


@slow
@pytest.mark.parametrize(
    ("topology", "algorithm", "num_states"),
    [
        (SQUARE, "ring", 117_022),
        (SQUARE, "tree", 1_110),
        (SMALL["2x3 less one"], "tree", 3_147),
        (SMALL["3x3 less one"], "tree", 66_849),
        (SMALL["a ring of 5"], "tree", 2_667),
    ],
    ids=str,
)
def test_all_states_between_ranks(topology, algorithm, num_states):
    model = Model(record(lower(registry.build_schedule(topology, algorithm, 2))))
    assert model.explore(max_states=num_states, eager_local=True) == num_states


@slow
@pytest.mark.parametrize(
    ("name", "num_proofs", "num_held"),
    [
        ("2x3 less one", 12, 1_759),
        ("3x3 less one", 15, 7_042),
        ("3x3 less a corner", 12, 4_636),
        ("a ring of 5", 15, 2_623),
    ],
)
def test_every_order_on_small_meshes(name, num_proofs, num_held):
    """Nine trees, and three operations of each other algorithm."""
    counts = prove_all(SMALL[name])
    assert (len(counts), total(counts, "held")) == (num_proofs, num_held)


@slow
@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_16_bit_partial_sums(name):
    prove_all(SMALL[name], ("reduce_scatter",), wire=np.float16)


@slow
@pytest.mark.parametrize("algorithm", ["ring", "row_pair", "tree"])
def test_every_order_with_pages(algorithm):
    program = lower(registry.build_schedule(HOLE, algorithm, 6))
    assert max(loop.num_rounds for loop in program.loops) > PAGE_ROUNDS
    Model(record(program)).prove()


@slow
@pytest.mark.parametrize("options", [{"devices_per_chip": 2}, {"with_idle": True}], ids=str)
def test_every_order_of_other_ranks(options):
    program = lower(registry.build_schedule(SMALL["2x3 less one"], "flood"), **options)
    for operation in OPERATIONS:
        model_of(program, operation).prove()


@pytest.mark.parametrize(
    "program",
    [
        crossing(2),
        crossing(2, op=COPY),
        lower(registry.build_schedule(PAIR, "chain")),
        tree(PAIR, 1),
    ],
    ids=["adding", "copying", "chain", "tree"],
)
def test_both_ways_of_checking_agree(program):
    """With every action left out, and with every two adjacent ones swapped."""
    recorded = record(program)
    num_faulty = num_tried = 0
    for rank, actions in enumerate(recorded):
        for i in range(1, len(actions) - 1):
            for between in ([], actions[i : i + 2][::-1]):
                faulty = list(recorded)
                faulty[rank] = actions[:i] + between + actions[i + max(1, len(between)) :]
                model = Model(faulty, checks="")
                is_found = finds_fault(model.prove)
                assert is_found == finds_fault(partial(model.explore, max_states=20_000))
                num_faulty += is_found
                num_tried += 1
    assert num_tried / 3 < num_faulty < num_tried


def finds_fault(check):
    try:
        check()
    except FAULTS:
        return True
    return False


@slow
@pytest.mark.parametrize("algorithm", [more_case("ring"), "row_pair", "tree"])
def test_random_orders_on_larger_meshes(algorithm):
    for topology, num_runs in ((HOLE, 25), (LARGE, 2)):
        model = Model(record(lower(registry.build_schedule(topology, algorithm, 6))))
        for seed in range(num_runs):
            model.run_randomly(seed)
    rng, share = random.Random(0), 40 / sum(map(len, model.code))
    assert model.prove(is_held=lambda rank, pc: rng.random() < share)["held"] > 5


# Planted faults ---------------------------------------------------------------------------------

RING = lower(registry.build_schedule(SQUARE, "ring"))
STREAM = tree(Topology.grid("3x1"), 6)
PIECES = {"chunk_rows": 2 * SLOTS}  # more than there are slots


def check_faulty(program, error, match=None, **options):
    model = model_of(program, **options)
    with pytest.raises(error, match=match):
        model.prove()
    return model


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        ("a credit too few", DeadlockError, "do not finish"),
        ("a credit too many", RaceError, "'arrived'.* is in use"),
        ("a slot reused early", RaceError, "'arrived'.* is in use"),
        ("no barrier", RaceError, "'kernel'.* is in use"),
        ("an extra wait", DeadlockError, "do not finish"),
    ],
)
def test_a_fault_in_every_operation(monkeypatch, fault, error, match, operation):
    PLANT[fault](monkeypatch.setattr)
    check_faulty(RING, error, match, operation=operation, **PIECES)


def test_a_credit_too_few_along_trees(monkeypatch):
    PLANT["a credit too few"](monkeypatch.setattr)
    model = check_faulty(STREAM, DeadlockError)
    with pytest.raises(DeadlockError):
        model.run_randomly(0)


def test_a_credit_too_many_is_found_in_all_ways(monkeypatch):
    PLANT["a credit too many"](monkeypatch.setattr)
    model = check_faulty(RING, RaceError, **PIECES)
    with pytest.raises(RaceError):
        model.run_randomly(0)
    with pytest.raises(RaceError):
        model.explore(max_states=20_000)


def test_a_credit_that_is_not_given_back(monkeypatch):
    grant = KernelLane.grant_credit
    monkeypatch.setattr(KernelLane, "grant_credit", lambda lane, n: n == 1 or grant(lane, n))
    check_faulty(STREAM, DeadlockError)


def test_no_barrier(monkeypatch):
    """Credits would be granted to a rank that has not entered the kernel."""
    PLANT["no barrier"](monkeypatch.setattr)
    for program in programs(SQUARE).values():
        check_faulty(program, RaceError)


def test_no_wait_for_the_credits_at_the_end(monkeypatch):
    take = KernelLane.take_credit
    monkeypatch.setattr(KernelLane, "take_credit", lambda lane, n: n == SLOTS or take(lane, n))
    check_faulty(STREAM, (RaceError, EndError))


def test_a_slot_read_before_its_piece_arrives(monkeypatch):
    wait_arrived, combine = KernelLane.wait_arrived, KernelLane.combine
    monkeypatch.setattr(KernelLane, "wait_arrived", lambda lane, piece: None)

    def too_early(lane, piece):
        combine(lane, piece)
        wait_arrived(lane, piece)

    monkeypatch.setattr(KernelLane, "combine", too_early)
    check_faulty(STREAM, RaceError)


def test_a_row_overwritten_before_it_leaves(monkeypatch):
    monkeypatch.setattr(KernelLane, "wait_sent", lambda lane, piece: None)
    with pytest.raises(RaceError):
        Model(record(crossing(3, op=COPY)), checks="").prove()


def test_a_round_too_far_ahead(monkeypatch):
    monkeypatch.setattr(pallas_tables, "_min_gap", lambda loop: (2, 1))
    check_faulty(RING, RaceError)


def test_lanes_that_do_not_wait_for_each_other(monkeypatch):
    program = crossing(2, op=MIXED, lanes=(1, -1))
    Model(record(program), checks="").prove()
    monkeypatch.setattr(KernelLane, "must_wait", lambda lane, step: False)
    with pytest.raises(RaceError):
        Model(record(program), checks="").prove()


def test_a_page_of_the_table_fetched_too_early(monkeypatch):
    loop = crossing_loop(3 * PAGE_ROUNDS, num_ranks=2, lanes=(1,))
    program = make_program([loop], (2, 1))
    Model(record(program), checks="").prove()
    monkeypatch.setattr(KernelRank, "wait_for_page", lambda rank: None)
    with pytest.raises(RaceError):
        Model(record(program), checks="").prove()


@pytest.mark.parametrize("rounds", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize(
    ("algorithm", "operation"), [("tree", "all_reduce"), *(("ring", each) for each in OPERATIONS)]
)
def test_two_rows_of_a_table_swapped(algorithm, operation, rounds):
    program = lower(registry.build_schedule(SQUARE, algorithm, 3))

    def swap(words):
        words[1, 0, list(rounds)] = words[1, 0, list(rounds[::-1])]

    check_faulty(program, FAULTS, operation=operation, edit_words=swap)
