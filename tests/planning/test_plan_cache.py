"""Schedules that took long to plan are read back from disk, unless anything about them differs."""

import json
from dataclasses import replace

import numpy as np
import pytest

import ftmesh
from ftmesh import TiledTopology, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT
from ftmesh.planning import plan_cache, selection

TOPO = Topology.grid("4x4", failed="1x1@1,1")


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The cache in a folder of its own, where everything is slow; what was planned, in order."""
    monkeypatch.setenv(plan_cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(plan_cache, "SLOW_SECONDS", -1)
    return []


def load_or_plan(calls, topology=TOPO, network=DEFAULT, num_chunks=8):
    def make():
        calls.append(num_chunks)
        return registry.build_schedule(topology, "tree", num_chunks)

    return plan_cache.load_or_plan(make, topology, network, "tree", num_chunks)


def test_the_second_call_reads_the_file(calls):
    first, second = load_or_plan(calls), load_or_plan(calls)
    assert calls == [8]
    assert first == second
    assert second.topology == TOPO


def test_other_arguments_are_other_files(calls, tmp_path):
    load_or_plan(calls)
    load_or_plan(calls, num_chunks=9)
    load_or_plan(calls, network=replace(DEFAULT, latency=1e-3))
    load_or_plan(calls, topology=Topology.grid("4x4", failed="1x1@2,2"))
    load_or_plan(calls, topology=Topology.grid("4x4", failed="1x1@1,1", failed_links="2,2-3,2"))
    assert len(calls) == len(list(tmp_path.iterdir())) == 5


def test_tiles_of_chips_with_two_cores_are_another_mesh():
    one, two = (replace(Topology.grid("8x8"), devices_per_chip=cores) for cores in (1, 2))
    keys = {
        plan_cache._key(TiledTopology.from_topology(chips, "2x1"), DEFAULT, ())
        for chips in (one, two)
    }
    assert len(keys) == 2


def test_other_source_code_is_another_file(calls, monkeypatch):
    load_or_plan(calls)
    monkeypatch.setattr(plan_cache, "_source_digest", lambda: "another version")
    load_or_plan(calls)
    assert calls == [8, 8]


def test_a_damaged_file_is_planned_again(calls, tmp_path):
    schedule = load_or_plan(calls)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert load_or_plan(calls) == schedule
    assert calls == [8, 8]


def test_a_wrong_schedule_is_planned_again(calls, tmp_path):
    """A file that can be read, and whose transfers all add where some must copy."""
    schedule = load_or_plan(calls)
    (file,) = tmp_path.iterdir()
    with np.load(file) as arrays:
        contents = dict(arrays)
    contents["op"][:] = 0
    np.savez(file, **contents)
    assert load_or_plan(calls) == schedule
    assert calls == [8, 8]


def test_a_schedule_for_another_mesh_is_not_taken(calls, tmp_path):
    """A file under the wrong name, as a clash of digests would be."""
    load_or_plan(calls, topology=Topology.grid("4x4", failed="1x1@2,2"))
    (other,) = tmp_path.iterdir()
    load_or_plan(calls)
    (own,) = set(tmp_path.iterdir()) - {other}
    other.replace(own)
    assert load_or_plan(calls).topology == TOPO
    assert len(calls) == 3


def test_what_is_quick_to_plan_leaves_no_file(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_cache, "SLOW_SECONDS", 60)
    load_or_plan(calls)
    assert not list(tmp_path.iterdir())


def test_an_empty_variable_turns_it_off(calls, monkeypatch):
    monkeypatch.setenv(plan_cache.CACHE_VARIABLE, "")
    load_or_plan(calls)
    load_or_plan(calls)
    assert calls == [8, 8]


def test_the_oldest_files_go_when_there_are_too_many(calls, tmp_path, monkeypatch):
    load_or_plan(calls)
    (first,) = tmp_path.iterdir()
    monkeypatch.setattr(plan_cache, "MAX_BYTES", 3 * first.stat().st_size // 2)
    load_or_plan(calls, num_chunks=9)
    assert first not in set(tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_ignored(calls, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(plan_cache.CACHE_VARIABLE, str(tmp_path / "file"))
    assert load_or_plan(calls).num_chunks == 8


def test_a_long_wait_is_announced(calls, caplog, monkeypatch):
    load_or_plan(calls)
    assert not caplog.records
    monkeypatch.setattr(plan_cache, "LARGE", 10)
    load_or_plan(calls)
    assert not caplog.records, "it is read from the cache"
    load_or_plan(calls, num_chunks=9)
    (record,) = caplog.records
    assert "planning for 4x4 less 1x1@1,1 takes up to a minute" in record.getMessage()


class TestChoices:
    """What algorithms cost is kept too, so that a second start compares nothing."""

    @pytest.fixture
    def file(self, calls, monkeypatch, tmp_path):
        """The file of the choice for `TOPO`, which nothing in this process remembers."""
        self.start(monkeypatch)
        ftmesh.plan(TOPO)
        (file,) = tmp_path.glob("*.json")
        return file

    @staticmethod
    def start(monkeypatch):
        """Begin as a new process would."""
        selection.compare_costs.cache_clear()
        selection._select.cache_clear()

    def test_a_second_start_compares_nothing(self, file, monkeypatch):
        first = ftmesh.plan(TOPO)
        self.start(monkeypatch)
        monkeypatch.setattr(selection, "select_algorithm", None)
        second = ftmesh.plan(TOPO)
        assert str(first) == str(second)
        assert first.algorithm == second.algorithm == "tree"

    def test_the_file_is_what_decides(self, file, monkeypatch):
        facts = json.loads(file.read_text())
        able = [one for one in facts if not one["rejection"] and one["executor"] != "xla"]
        other = next(one["algorithm"] for one in able if one["algorithm"] != "tree")
        facts.sort(key=lambda one: (one["algorithm"], one["executor"]) != (other, "ppermute"))
        file.write_text(json.dumps(facts))
        self.start(monkeypatch)
        assert ftmesh.plan(TOPO).algorithm == other

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "[]",
            "{}",
            "[1]",
            "[{}]",
            '[{"algorithm": "tree"}]',
            '[{"algorithm": "none", "rounds": 1, "seconds": 0.1, "rejection": "", '
            '"partial_sum_dtype": "float32", "wires_seconds": null, "executor": "ppermute"}]',
            '[{"algorithm": "tree", "rounds": 1, "seconds": NaN, "rejection": "", '
            '"partial_sum_dtype": "float32", "wires_seconds": null, "executor": "ppermute"}]',
            '[{"algorithm": "tree", "rounds": 1, "seconds": 0.1, "rejection": "", '
            '"partial_sum_dtype": "float32", "wires_seconds": null, "executor": "sh"}]',
            "[" * 100_000,
        ],
    )
    def test_a_damaged_file_is_not_believed(self, file, monkeypatch, content):
        want = str(ftmesh.plan(TOPO))
        file.write_text(content)
        self.start(monkeypatch)
        assert str(ftmesh.plan(TOPO)) == want
