"""Findings in words, and what they exclude."""

import json

from ftmesh import Topology
from ftmesh.health.examination import Finding, Findings

MESH = Topology.grid("4x4", failed="1x1@3,3")


def findings(*entries, untried=(), topology=MESH):
    return Findings(topology, entries, 22, untried)


def link(kind, *chips, **options):
    return Finding(kind, chips, "no data arrived", **options)


def test_healthy_mesh():
    healthy = findings()
    assert healthy.is_healthy
    assert str(healthy) == "all 15 chips and 22 links are healthy"
    assert healthy.failed == "1x1@3,3"


def test_wrong_and_silent_chips_are_excluded_and_slow_ones_are_not():
    result = findings(
        Finding("wrong", ((1, 2),), "float32 in 6 of 6 runs"),
        Finding("silent", ((2, 2),), "no answer within 60 s"),
        Finding.slow(((0, 0),), 0.5, 0.1),
    )
    assert result.failed == "2x1@1,2;1x1@3,3"
    assert result.chips("slow") == ((0, 0),)
    assert str(result).splitlines() == [
        "chip 1,2 is wrong: float32 in 6 of 6 runs",
        "chip 2,2 is silent: no answer within 60 s",
        "chip 0,0 is slow: 500 ms; others take 100 ms",
        "--failed '2x1@1,2;1x1@3,3'",
    ]
    assert result.damaged_topology.drawing() == "....\n....\n.XX.\n...X"


def test_a_bad_link_excludes_the_end_with_fewer_links():
    corner = findings(link("wrong", (0, 0), (1, 0)))
    assert corner.quarantined == {(0, 0)}
    assert corner.damaged_topology.failed_links == {((0, 0), (1, 0))}
    assert corner.damaged_topology.failed == MESH.failed
    assert findings(link("slow", (0, 0), (1, 0))).quarantined == frozenset()


def test_links_can_be_excluded_without_their_chips():
    """Links of bad chips go with them, and uncertain links stay in."""
    topology = Topology.grid("4x4x2", failed="1x1x1@3,3,0", failed_links="0,3,0-0,3,1")
    result = findings(
        Finding("wrong", ((1, 1, 1),), "float32 in 6 of 6 runs"),
        link("wrong", (1, 0, 1), (1, 1, 1)),
        link("silent", (2, 0, 0), (2, 0, 1)),
        link("silent", (0, 0, 0), (0, 1, 0), is_sure=False),
        topology=topology,
    )
    assert (
        result.link_exclusions
        == result.to_json()["links_alone"]
        == {
            "failed": "1x1x1@3,3,0;1x1x1@1,1,1",
            "failed_links": "0,3,0-0,3,1;2,0,0-2,0,1",
        }
    )
    lines = str(result).splitlines()
    assert lines[-2] == (
        "to keep both ends of a bad link: --failed '1x1x1@3,3,0;1x1x1@1,1,1' "
        "--failed-links '0,3,0-0,3,1;2,0,0-2,0,1'; otherwise:"
    )
    assert lines[-1].startswith("--failed '")
    damaged = Topology.grid("4x4x2", **result.link_exclusions)
    assert (damaged.num_live, len(damaged.failed_links)) == (30, 2)
    assert findings(Finding("wrong", ((1, 2),), "no data arrived")).link_exclusions is None


def test_the_chip_with_most_bad_links_is_excluded():
    three = [link("silent", (1, 1), other) for other in ((2, 1), (1, 2))]
    assert findings(*three, link("wrong", (0, 1), (1, 1))).quarantined == {(1, 1)}


def test_links_of_an_excluded_chip_exclude_nothing_more():
    chip = Finding("wrong", ((1, 1),), "float32 in 6 of 6 runs")
    assert findings(chip, link("wrong", (0, 1), (1, 1))).quarantined == {(1, 1)}


def test_uncertain_findings_exclude_nothing():
    unsure = [link("silent", (x, 0), (x + 1, 0), is_sure=False) for x in (0, 2)]
    result = findings(*unsure, untried=(((0, 0), (0, 1)),))
    assert result.quarantined == frozenset()
    assert not result.is_healthy
    assert "--one-by-one" in str(result)
    assert "1 of 22 links were not tested" in str(result)


def test_untested_links_are_not_healthy():
    assert not findings(untried=(((0, 0), (0, 1)),)).is_healthy


def test_json():
    data = json.loads(json.dumps(findings(link("wrong", (0, 0), (1, 0))).to_json()))
    assert data["well"] is False
    assert data["failed"] == "1x1@0,0;1x1@3,3"
    assert data["found"][0]["chips"] == [[0, 0], [1, 0]]
