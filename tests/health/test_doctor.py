"""Chips and links that are planted as sick are found and named, and well ones are not."""

from dataclasses import replace

import pytest

from ftmesh import Topology
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.health.doctor import examine
from ftmesh.health.probe_programs import Probes
from ftmesh.testing import cpu_grid
from ftmesh.testing.unhealthy import Sick, wake

pytestmark = pytest.mark.usefixtures("quick_compiler")

SMALL = Probes(side=16, chain=2, words=1 << 10, pattern=1 << 8, repeats=3)
FEW = replace(SMALL, one_by_one=0)  # many links in a program
LIMIT = 5.0  # where something is silent
NO_LIMIT = 60.0


@pytest.fixture(scope="module")
def mesh():
    return cpu_grid("4x4")


@pytest.fixture
def look(mesh):
    """The findings where some are planted, which answer at last, when all is over."""

    def examined(text, probes=SMALL, topology=mesh, **options):
        sick = replace(probes, sick=Sick.parse(text, topology))
        return examine(topology, **{"limit": LIMIT, "probes": sick, **options})

    yield examined
    wake()


@pytest.mark.slow
def test_a_well_mesh_is_well(look):
    seen = []
    found = look("", limit=NO_LIMIT, progress=lambda *args: seen.append(args))
    assert str(found) == "all 16 chips and 24 links are well"
    assert seen[0] == (0, 26, "who answers")
    assert seen[-1] == (26, 26, "")
    for _ in range(3):
        assert look("", limit=NO_LIMIT).is_well
        assert look("", FEW, limit=NO_LIMIT).is_well


@pytest.mark.slow
def test_all_at_once(look):
    found = look("wrong@1,2;slow@0,3;silent@2,2;link-wrong@0,0-1,0;link-slow@3,1-3,0")
    assert [(one.kind, one.chips) for one in found.found] == [
        ("slow", ((0, 3),)),
        ("wrong", ((1, 2),)),
        ("silent", ((2, 2),)),
        ("wrong", ((0, 0), (1, 0))),
        ("slow", ((3, 0), (3, 1))),
    ]
    slow, chip, silent, link, slow_link = found.found
    assert chip.detail == (
        "float32 4 of 4 times, bfloat16 4 of 4 times, whole numbers 4 of 4 times"
    )
    assert silent.detail == "no answer within 5 s"
    assert link.detail == "1 word wrong from 0,0 to 1,0"
    assert slow.seconds > 0.3 > 3 * slow.usual
    assert slow_link.seconds > 0.2 > 3 * slow_link.usual
    assert found.failed == "1x1@0,0;2x1@1,2"
    assert not found.untried


def test_a_link_that_is_silent_ends_the_look_at_links(look):
    found = look("link-silent@1,1-1,2")
    assert found.links("silent") == (((1, 1), (1, 2)),)
    assert found.failed == "1x1@1,2"
    assert found.chips("wrong", "silent", "slow") == ()
    assert 0 < len(found.untried) < 24
    assert "links were not tried" in str(found)


@pytest.mark.slow
def test_of_many_links_at_once_one_is_silent(look):
    found = look("link-silent@0,1-0,0", FEW)
    assert ((0, 0), (0, 1)) in found.links("silent")
    assert found.masked == frozenset()  # it may be any of them
    assert "--one-by-one" in str(found)


@pytest.mark.slow
def test_who_is_woken_falls_silent_no_more(look):
    """A program comes to its silent link twice: once there, and once on the way back."""
    assert look("link-silent@0,1-0,0", FEW).links("silent")
    wake()
    assert look("", FEW, limit=NO_LIMIT).is_well


@pytest.mark.slow
def test_of_many_links_at_once_one_is_wrong_and_one_is_slow(look):
    found = look("link-wrong@3,1-3,2;link-slow@0,0-1,0", FEW, limit=NO_LIMIT)
    assert found.links("wrong") == (((3, 1), (3, 2)),)
    assert found.links("slow") == (((0, 0), (1, 0)),)


@pytest.mark.slow
def test_a_chip_that_answers_and_does_not_compute(look, mesh, monkeypatch):
    monkeypatch.setattr(Sick, "delayed", Sick.answer)  # silent where it would be slow
    monkeypatch.setattr(Sick, "answer", lambda sick, x, place: x)
    found = look("silent@2,1", replace(SMALL, words=1 << 11))
    assert found.chips("silent") == ((2, 1),)
    assert found.found[0].detail == "answers, and computed nothing within 5 s"
    assert len(found.untried) == 20  # of the others


@pytest.mark.slow
def test_failed_chips_are_left_alone(look):
    topology = cpu_grid("4x4", failed="2x2@1,1")
    found = look("wrong@0,0", topology=topology, limit=NO_LIMIT)
    assert found.failed == "1x1@0,0;2x2@1,1"
    assert found.num_links == 12
    assert found.picture.drawing() == "X...\n.XX.\n.XX.\n...."


@pytest.mark.slow
def test_the_environment_says_what_is_sick(monkeypatch):
    monkeypatch.setenv("FTMESH_SICK", "wrong@1,0")
    assert examine(cpu_grid("2x2"), limit=NO_LIMIT).failed == "1x1@1,0"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tired@1,2", "'tired@1,2' is no sickness: write wrong@1,2"),
        ("wrong", "is no sickness"),
        ("wrong@1;2", "chip (1,) is not on the mesh"),
        ("slow@a,b", "'a,b' is not a coord"),
        ("link-wrong@0,0", "'0,0' is not a link"),
        ("link-wrong@0,0-2,0", "there is no link there on 4x4"),
        ("silent@9,9", "chip (9, 9) is not on the mesh"),
    ],
)
def test_a_sickness_that_is_none(mesh, text, reason):
    with pytest.raises(ValueError, match=r".*") as error:
        Sick.parse(text, mesh)
    assert reason in str(error.value)


def test_what_cannot_be_looked_at(mesh):
    with pytest.raises(TopologyError, match="has no devices to look at"):
        examine(Topology.grid("4x4"))
    with pytest.raises(ArgumentError, match="a limit of 0 s and a factor of 3"):
        examine(mesh, limit=0)
    with pytest.raises(ArgumentError, match="a factor of 1: give more than 0, and more than 1"):
        examine(mesh, slow=1)
