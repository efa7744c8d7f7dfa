"""Random damages, a few of them; and that what goes wrong is counted."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from examples import damages
from ftmesh import PlanError, Topology
from ftmesh.algorithms import registry


def test_damages_are_of_all_kinds_and_the_same_every_time():
    rng = np.random.default_rng(0)
    found = [damages.damaged(rng) for _ in range(60)]
    assert {len(topology.shape) for topology in found} == {1, 2, 3}
    assert any(topology.failed for topology in found)
    assert any(topology.failed_links for topology in found)
    assert {any(topology.wrap) for topology in found} == {True, False}
    assert {len(topology.components()) > 1 for topology in found} == {True, False}
    again = np.random.default_rng(0)
    assert [damages.damaged(again) for _ in range(60)] == found


def test_a_few(capsys):
    assert damages.main(["--number", "6", "--computed", "0", "--seed", "3"]) == 0
    assert "12 plans proved, 0 of them computed; 0 refused, 0 wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_some_more_and_some_computed(capsys):
    assert damages.main(["--number", "40", "--computed", "2", "--seed", "11"]) == 0
    assert "80 plans proved, 4 of them computed; 0 refused" in capsys.readouterr().out


def dropped(topology, name, num_chunks):
    """A schedule that lacks its last transfer."""
    made = registry.tree.build_schedule(topology, num_chunks)
    (phase,) = made.phases
    less = phase.transfers.take(slice(0, -1))
    return registry.Schedule(topology, name, num_chunks, (type(phase)(phase.name, less),))


def refused(topology, name, num_chunks):
    raise PlanError("no")


@pytest.mark.parametrize(
    ("planted", "kind"), [(dropped, "wrong"), (refused, "refused")], ids=["wrong", "refused"]
)
def test_what_goes_wrong_is_counted(monkeypatch, planted, kind):
    monkeypatch.setattr(damages.planners, "schedule", planted)
    counts = Counter()
    lines = list(
        damages.troubles(Topology.grid("3x3"), 4, counts, defaultdict(float), compute=False)
    )
    assert counts == {kind: 2}
    assert all(line.startswith(f"{kind} by") for line in lines)


def test_a_cut_mesh_is_refused_with_its_parts_and_the_largest_offered():
    topology = Topology.grid("5x4", failed="1x4@1,0")
    parts = topology.components()
    assert damages.is_refused(topology, parts)
    assert not damages.is_refused(topology, parts[::-1] + parts[:1])
    with pytest.raises(PlanError, match="the largest part what failed='2x4@0,0' leaves"):
        registry.build_schedule(topology, "flood")
