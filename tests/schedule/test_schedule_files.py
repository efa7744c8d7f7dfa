"""Schedule files: they round-trip, NumPy alone can replay them, and damaged ones are rejected."""

import json
import pickle

import numpy as np
import pytest

import ftmesh
from ftmesh import ScheduleError, ScheduleFileError, Topology, VerificationError
from ftmesh.algorithms import rings, row_pair
from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.schedule.transfers import COLUMN_NAMES

HOLE = Topology.grid("6x6", failed="2x2@2,2")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.npz"


def arrays_of(schedule, path):
    ftmesh.save(schedule, path)
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def rewrite(path, arrays):
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_save_and_load(name, path):
    topologies = {
        "two_dim": Topology.grid("6x6", wrap=[True, False]),
        "chain": Topology.grid("8", wrap=True, failed="1@3"),
        "multi_ring": Topology.grid("3x3x4", wrap=True),
    }
    schedule = ALGORITHMS[name](topologies.get(name, HOLE))
    ftmesh.save(schedule, path)
    assert ftmesh.load(path) == schedule
    assert [p.name for p in path.parent.iterdir()] == ["plan.npz"]


@pytest.mark.parametrize(("old", "new"), [("colours", "multi_ring"), ("line", "chain")])
def test_old_names_of_algorithms_are_read(old, new, path):
    arrays = arrays_of(rings.build_schedule(HOLE), path)
    meta = json.loads(str(arrays["meta"])) | {"algorithm": old}
    rewrite(path, arrays | {"meta": np.array(json.dumps(meta))})
    assert ftmesh.load(path).algorithm == new


def test_failed_links_round_trip(path):
    topo = Topology((4, 4), (False, False), failed_links=frozenset({((0, 0), (1, 0))}))
    ftmesh.save(row_pair.build_schedule(topo), path)
    assert ftmesh.load(path).topology == topo


def test_a_schedule_is_loaded_without_devices(path):
    topo = Topology.from_devices(list("abcdefghijklmnop"), shape="4x4", failed="2x2@0,0")
    schedule = row_pair.build_schedule(topo)
    ftmesh.save(schedule, path)
    assert ftmesh.load(path) == schedule
    assert ftmesh.load(path).topology == topo.without_devices()
    assert schedule != row_pair.build_schedule(Topology.grid("4x4", failed="2x2@0,0", wrap=True))


def test_the_columns_and_meta_of_the_format(path):
    schedule = row_pair.build_schedule(HOLE)
    arrays = arrays_of(schedule, path)
    meta = json.loads(str(arrays["meta"]))
    assert meta["format"] == "ftmesh.schedule/1"
    assert meta["shape"] == [6, 6]
    assert meta["wrap"] == [False, False]
    assert meta["failed"] == [[2, 2], [2, 3], [3, 2], [3, 3]]
    assert meta["failed_links"] == []
    assert meta["algorithm"] == "row_pair"
    assert meta["num_chunks"] == schedule.num_chunks
    for name in ("round", "lane", "src", "dst", "chunk", "count", "op", "coords", "owner"):
        assert arrays[name].dtype == np.int32, name
    assert arrays["coords"].tolist() == [list(c) for c in HOLE.coords]
    assert arrays["rounds_in_reduce_scatter"] == schedule.rounds_in_reduce_scatter
    assert (np.diff(arrays["round"]) >= 0).all()


@pytest.mark.parametrize("algorithm", [rings, row_pair])
def test_numpy_alone_can_replay_the_file(algorithm, path):
    arrays = arrays_of(algorithm.build_schedule(HOLE), path)
    num_chunks = json.loads(str(arrays["meta"]))["num_chunks"]
    ranks = len(arrays["coords"])
    initial = np.random.default_rng(0).integers(0, 1000, (ranks, num_chunks))
    held = initial.copy()
    rows = np.stack(
        [arrays[name] for name in ("round", "src", "dst", "chunk", "count", "op")], axis=1
    )
    for index in range(rows[-1, 0] + 1):
        if index == arrays["rounds_in_reduce_scatter"]:
            chunk = np.arange(num_chunks)
            assert (held[arrays["owner"], chunk] == initial.sum(axis=0)).all()
        current = rows[rows[:, 0] == index]
        read = [held[src, chunk : chunk + count].copy() for _, src, _, chunk, count, _ in current]
        for (_, _, dst, chunk, count, op), value in zip(current, read, strict=True):
            if op == 0:
                held[dst, chunk : chunk + count] += value
            else:
                held[dst, chunk : chunk + count] = value
    assert (held == initial.sum(axis=0)).all()


def test_a_file_without_phases_gets_default_phases(path):
    schedule = rings.build_schedule(HOLE)
    arrays = arrays_of(schedule, path)
    meta = json.loads(str(arrays["meta"]))
    del meta["phases"], meta["devices_per_chip"]
    rewrite(path, arrays | {"meta": np.array(json.dumps(meta))})
    loaded = ftmesh.load(path)
    assert [phase.name for phase in loaded.phases] == ["reduce-scatter", "all-gather"]
    assert loaded.num_rounds == schedule.num_rounds


class TestDamagedFiles:
    def check_rejected(self, path, says, error=ScheduleFileError):
        with pytest.raises(error, match=says) as caught:
            ftmesh.load(path)
        assert str(path) in str(caught.value)

    def test_missing(self, path):
        self.check_rejected(path, "no such file")

    @pytest.mark.parametrize("keep", [0.02, 0.5, 0.98])
    def test_truncated(self, path, keep):
        ftmesh.save(rings.build_schedule(HOLE), path)
        full = path.read_bytes()
        path.write_bytes(full[: int(keep * len(full))])
        self.check_rejected(path, "damaged or truncated|not a plain .npz")

    def test_a_flipped_byte(self, path):
        ftmesh.save(rings.build_schedule(HOLE), path)
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 3] ^= 0xFF
        path.write_bytes(bytes(raw))
        self.check_rejected(path, "damaged|not")

    def test_pickled(self, path):
        path.write_bytes(pickle.dumps({"round": [1, 2, 3]}))
        self.check_rejected(path, "pickled")

    def test_pickled_inside(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        rewrite(path, arrays | {"owner": np.array([{}], object)})
        self.check_rejected(path, "pickled")

    def test_another_version(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        meta = json.loads(str(arrays["meta"])) | {"format": "ftmesh.schedule/2"}
        rewrite(path, arrays | {"meta": np.array(json.dumps(meta))})
        self.check_rejected(
            path, "format 'ftmesh.schedule/2'; this ftmesh reads 'ftmesh.schedule/1'"
        )

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda a: a | {"meta": np.array("{")}, "'meta' is not JSON"),
            (lambda a: a | {"meta": np.array("[]")}, "format None"),
            (lambda a: {k: v for k, v in a.items() if k != "lane"}, "has no 'lane'"),
            (lambda a: a | {"src": a["src"].astype(np.int64)}, "'src' is int64, not int32"),
            (lambda a: a | {"src": a["src"][1:]}, "differ in length"),
            (lambda a: a | {"round": a["round"][::-1]}, "not sorted by round"),
            (lambda a: a | {"coords": a["coords"][::-1]}, "'coords' are not the live chips"),
            (lambda a: a | {"chunk": a["chunk"] + np.int32(2**31 - 9)}, "a transfer moves chunk"),
            (lambda a: a | {"count": a["count"] * np.int32(2**31 - 1)}, "a transfer moves chunk"),
            (lambda a: a | {"round": a["round"] * np.int32(2**20)}, "transfers cannot fill"),
            (lambda a: a | {"lane": a["lane"] + np.int32(2**31 - 2)}, "transfers cannot fill"),
            (lambda a: {k: v[:0] if k in COLUMN_NAMES else v for k, v in a.items()}, "no transf"),
            (lambda a: a | {"rounds_in_reduce_scatter": np.zeros(1, np.int32)}, "single number"),
        ],
    )
    def test_inconsistent(self, path, change, says):
        rewrite(path, change(arrays_of(rings.build_schedule(HOLE), path)))
        self.check_rejected(path, says)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            *(("shape", value) for value in (4, None, ["6", "6"], [6.0, 6.0], [], [6, -6])),
            *(("wrap", value) for value in (False, "no", [0, 0])),
            *(("failed", value) for value in (5, None, [2, 2], [["a"]])),
            *(("failed_links", value) for value in (5, [[[0], [1], [2]]], [[0, 1]])),
            *(("num_chunks", value) for value in (24.0, "24", None, -1, 2**40, True)),
            *(
                ("phases", value)
                for value in ("x", [1], [{"name": "a"}], [{"name": 1, "rounds": 2}])
            ),
            ("algorithm", [1]),
            ("devices_per_chip", -3),
        ],
    )
    def test_bad_values_in_meta(self, path, key, value):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        meta = json.loads(str(arrays["meta"])) | {key: value}
        rewrite(path, arrays | {"meta": np.array(json.dumps(meta))})
        self.check_rejected(path, f"'meta' has {key} ")

    def test_a_failed_link_with_its_high_end_first(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        meta = json.loads(str(arrays["meta"])) | {"failed_links": [[[1, 0], [0, 0]]]}
        rewrite(path, arrays | {"meta": np.array(json.dumps(meta))})
        loaded = ftmesh.load(path)
        assert loaded.topology.failed_links == {((0, 0), (1, 0))}
        assert not loaded.is_neighbour_only  # a hop now leads around that link

    def test_rows_before_the_first_round(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        row = {"round": -1, "lane": 0, "src": 0, "dst": 1, "chunk": 0, "count": 1, "op": 1}
        more = {k: np.concatenate(([v], arrays[k])).astype(np.int32) for k, v in row.items()}
        rewrite(path, arrays | more)
        self.check_rejected(path, "not sorted by round, starting at 0")

    def test_more_chunks_than_the_rows_can_move(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        meta = json.loads(str(arrays["meta"])) | {"num_chunks": 60_000_000}
        rewrite(path, arrays | {"meta": np.array(json.dumps(meta))})
        self.check_rejected(path, "need 1,920,000,000 or more")

    def test_owners_without_a_reduce_scatter(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        rewrite(path, arrays | {"rounds_in_reduce_scatter": np.int32(0)})
        self.check_rejected(
            path, "reduce-scatter must end where a phase ends.* is 0", ScheduleError
        )

    def test_a_single_array(self, tmp_path):
        np.save(tmp_path / "plan.npy", np.arange(3))
        self.check_rejected(tmp_path / "plan.npy", "single array")

    def test_an_invalid_round(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        rewrite(path, arrays | {"dst": arrays["src"]})
        self.check_rejected(path, "round 0, lane 0.*cannot send to itself", ScheduleError)

    def test_a_wrong_sum(self, path):
        arrays = arrays_of(rings.build_schedule(HOLE), path)
        rewrite(path, arrays | {"op": np.zeros_like(arrays["op"])})
        self.check_rejected(path, "2 times", VerificationError)
        assert ftmesh.load(path, verify=False).num_chunks == 64


def test_save_leaves_nothing_if_writing_fails(tmp_path):
    with pytest.raises(ScheduleFileError, match="cannot write"):
        ftmesh.save(rings.build_schedule(HOLE), tmp_path / "nowhere" / "plan.npz")
    with pytest.raises(ScheduleFileError, match=r"cannot write .*null byte"):
        ftmesh.save(rings.build_schedule(HOLE), str(tmp_path / "a\0b"))
    with pytest.raises(ScheduleFileError, match="it is not a file"):
        ftmesh.save(rings.build_schedule(HOLE), tmp_path)
    assert list(tmp_path.iterdir()) == []
