"""Emulated faults of chips and links are found and named; healthy ones are not."""

from dataclasses import replace

import pytest

from ftmesh import Topology
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.health.doctor import examine
from ftmesh.health.probe_programs import Probes
from ftmesh.testing import cpu_grid
from ftmesh.testing.emulation import UnhealthySpec, release_silent

pytestmark = pytest.mark.usefixtures("quick_compiler")

SMALL = Probes(matrix_size=16, num_products=2, num_words=1 << 10, pattern_words=1 << 8, repeats=3)
TOGETHER = replace(SMALL, max_single_links=0)  # many links in a program
SHORT = 5.0  # seconds, where something is silent
LONG = 60.0


@pytest.fixture(scope="module")
def mesh():
    return cpu_grid("4x4")


@pytest.fixture
def examined(mesh):
    """Examine a mesh with emulated faults; silent ones are released at the end."""

    def run(text, probes=SMALL, topology=mesh, **options):
        unhealthy = replace(probes, unhealthy=UnhealthySpec.parse(text, topology))
        return examine(topology, **{"timeout": SHORT, "probes": unhealthy, **options})

    yield run
    release_silent()


@pytest.mark.slow
def test_healthy_mesh(examined):
    seen = []
    findings = examined("", timeout=LONG, progress=lambda *args: seen.append(args))
    assert str(findings) == "all 16 chips and 24 links are healthy"
    assert seen[0] == (0, 26, "testing which chips respond")
    assert seen[-1] == (26, 26, "")
    for _ in range(3):
        assert examined("", timeout=LONG).is_healthy
        assert examined("", TOGETHER, timeout=LONG).is_healthy


@pytest.mark.slow
def test_all_kinds_at_once(examined):
    findings = examined("wrong@1,2;slow@0,3;silent@2,2;link-wrong@0,0-1,0;link-slow@3,1-3,0")
    assert [(entry.kind, entry.chips) for entry in findings.entries] == [
        ("slow", ((0, 3),)),
        ("wrong", ((1, 2),)),
        ("silent", ((2, 2),)),
        ("wrong", ((0, 0), (1, 0))),
        ("slow", ((3, 0), (3, 1))),
    ]
    slow, chip, silent, link, slow_link = findings.entries
    assert chip.detail == (
        "float32 in 4 of 4 runs, bfloat16 in 4 of 4 runs, integers in 4 of 4 runs"
    )
    assert silent.detail == "no answer within 5 s"
    assert link.detail == "1 wrong word from 0,0 to 1,0"
    assert slow.seconds > 0.3 > 3 * slow.usual
    assert slow_link.seconds > 0.2 > 3 * slow_link.usual
    assert findings.failed == "1x1@0,0;2x1@1,2"
    assert not findings.untried


def test_silent_link_blocks_the_test_of_other_links(examined):
    findings = examined("link-silent@1,1-1,2")
    assert findings.links("silent") == (((1, 1), (1, 2)),)
    assert findings.failed == "1x1@1,2"
    assert findings.chips("wrong", "silent", "slow") == ()
    assert 0 < len(findings.untried) < 24
    assert "links were not tested" in str(findings)


@pytest.mark.slow
def test_one_silent_link_of_many_tested_together(examined):
    findings = examined("link-silent@0,1-0,0", TOGETHER)
    assert ((0, 0), (0, 1)) in findings.links("silent")
    assert findings.quarantined == frozenset()  # it may be any of them
    assert "--one-by-one" in str(findings)


@pytest.mark.slow
def test_released_links_stay_responsive(examined):
    """A program uses its silent link twice: there and back."""
    assert examined("link-silent@0,1-0,0", TOGETHER).links("silent")
    release_silent()
    assert examined("", TOGETHER, timeout=LONG).is_healthy


@pytest.mark.slow
def test_wrong_and_slow_links_of_many_tested_together(examined):
    findings = examined("link-wrong@3,1-3,2;link-slow@0,0-1,0", TOGETHER, timeout=LONG)
    assert findings.links("wrong") == (((3, 1), (3, 2)),)
    assert findings.links("slow") == (((0, 0), (1, 0)),)


@pytest.mark.slow
def test_chip_that_responds_but_does_not_compute(examined, mesh, monkeypatch):
    monkeypatch.setattr(UnhealthySpec, "delay", UnhealthySpec.silence)  # instead of slow
    monkeypatch.setattr(UnhealthySpec, "silence", lambda spec, x, index: x)
    findings = examined("silent@2,1", replace(SMALL, num_words=1 << 11))
    assert findings.chips("silent") == ((2, 1),)
    assert findings.entries[0].detail == "responds, but computed nothing within 5 s"
    assert len(findings.untried) == 20  # all links of the others


@pytest.mark.slow
def test_failed_chips_are_not_tested(examined):
    topology = cpu_grid("4x4", failed="2x2@1,1")
    findings = examined("wrong@0,0", topology=topology, timeout=LONG)
    assert findings.failed == "1x1@0,0;2x2@1,1"
    assert findings.num_links == 12
    assert findings.damaged_topology.drawing() == "X...\n.XX.\n.XX.\n...."


@pytest.mark.slow
def test_faults_from_the_environment(monkeypatch):
    monkeypatch.setenv("FTMESH_SICK", "wrong@1,0")
    assert examine(cpu_grid("2x2"), timeout=LONG).failed == "1x1@1,0"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tired@1,2", "'tired@1,2' is not a fault of a chip or link: write wrong@1,2"),
        ("wrong", "is not a fault of a chip or link"),
        ("wrong@1;2", "chip (1,) is not on the mesh"),
        ("slow@a,b", "'a,b' is not a coord"),
        ("link-wrong@0,0", "'0,0' is not a link"),
        ("link-wrong@0,0-2,0", "4x4 has no such link"),
        ("silent@9,9", "chip (9, 9) is not on the mesh"),
    ],
)
def test_malformed_faults_are_rejected(mesh, text, reason):
    with pytest.raises(ValueError, match=r".*") as error:
        UnhealthySpec.parse(text, mesh)
    assert reason in str(error.value)


def test_bad_arguments_are_rejected(mesh):
    with pytest.raises(TopologyError, match="has no devices to test"):
        examine(Topology.grid("4x4"))
    with pytest.raises(ArgumentError, match="timeout=0 and slow=3"):
        examine(mesh, timeout=0)
    with pytest.raises(ArgumentError, match="slow=1: give a timeout of more than 0 seconds and a"):
        examine(mesh, slow=1)
