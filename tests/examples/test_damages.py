"""A few randomly damaged meshes, and that problems are counted."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from examples import damages
from ftmesh import PlanError, Topology
from ftmesh.algorithms import registry


def test_meshes_are_varied_and_reproducible():
    rng = np.random.default_rng(0)
    meshes = [damages.random_mesh(rng) for _ in range(60)]
    assert {len(topology.shape) for topology in meshes} == {1, 2, 3}
    assert any(topology.failed for topology in meshes)
    assert any(topology.failed_links for topology in meshes)
    assert {any(topology.wrap) for topology in meshes} == {True, False}
    assert {len(topology.components()) > 1 for topology in meshes} == {True, False}
    again = np.random.default_rng(0)
    assert [damages.random_mesh(again) for _ in range(60)] == meshes


def test_a_few(capsys):
    assert damages.main(["--number", "6", "--computed", "0", "--seed", "3"]) == 0
    assert "12 plans verified, 0 of them run; 0 rejected, 0 wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_more_meshes_with_plans_that_are_run(capsys):
    assert damages.main(["--number", "40", "--computed", "2", "--seed", "11"]) == 0
    assert "80 plans verified, 4 of them run; 0 rejected" in capsys.readouterr().out


def drop_last_transfer(topology, name, num_chunks):
    """Build a schedule without its last transfer."""
    schedule = registry.tree.build_schedule(topology, num_chunks)
    (phase,) = schedule.phases
    less = phase.transfers.take(slice(0, -1))
    return registry.Schedule(topology, name, num_chunks, (type(phase)(phase.name, less),))


def reject(topology, name, num_chunks):
    raise PlanError("no")


@pytest.mark.parametrize(
    ("build_schedule", "kind"),
    [(drop_last_transfer, "wrong"), (reject, "rejected")],
    ids=["wrong", "rejected"],
)
def test_problems_are_counted(monkeypatch, build_schedule, kind):
    monkeypatch.setattr(damages.registry, "build_schedule", build_schedule)
    counts = Counter()
    lines = list(
        damages.find_problems(Topology.grid("3x3"), 4, counts, defaultdict(float), compute=False)
    )
    assert counts == {kind: 2}
    assert all(line.startswith(f"{kind} by") for line in lines)


def test_disconnected_mesh_is_rejected_with_its_parts():
    topology = Topology.grid("5x4", failed="1x4@1,0")
    parts = topology.components()
    assert damages.is_rejected(topology, parts)
    assert not damages.is_rejected(topology, parts[::-1] + parts[:1])
    with pytest.raises(PlanError, match="failed='2x4@0,0' leaves the largest part"):
        registry.build_schedule(topology, "flood")
