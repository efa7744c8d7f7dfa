"""What was found, in words, and what to leave out for it."""

import json

import pytest

from ftmesh import Topology
from ftmesh.health.findings import Finding, Findings, laggards, minority

MESH = Topology.grid("4x4", failed="1x1@3,3")


def findings(*found, untried=(), topology=MESH):
    return Findings(topology, found, 22, untried)


def link(kind, *chips, **options):
    return Finding(kind, chips, "nothing came", **options)


def test_all_is_well():
    well = findings()
    assert well.is_well
    assert str(well) == "all 15 chips and 22 links are well"
    assert well.failed == "1x1@3,3"


def test_chips_that_are_wrong_or_silent_are_left_out_and_slow_ones_are_not():
    found = findings(
        Finding("wrong", ((1, 2),), "float32 6 of 6 times"),
        Finding("silent", ((2, 2),), "no answer within 60 s"),
        Finding.slow(((0, 0),), 0.5, 0.1),
    )
    assert found.failed == "2x1@1,2;1x1@3,3"
    assert found.chips("slow") == ((0, 0),)
    assert str(found).splitlines() == [
        "chip 1,2 is wrong: float32 6 of 6 times",
        "chip 2,2 is silent: no answer within 60 s",
        "chip 0,0 is slow: 500 ms, where others take 100 ms",
        "--failed '2x1@1,2;1x1@3,3'",
    ]
    assert found.picture.drawing() == "....\n....\n.XX.\n...X"


def test_of_a_link_the_end_goes_that_loses_less():
    corner = findings(link("wrong", (0, 0), (1, 0)))
    assert corner.masked == {(0, 0)}
    assert corner.picture.failed_links == {((0, 0), (1, 0))}
    assert corner.picture.failed == MESH.failed
    assert findings(link("slow", (0, 0), (1, 0))).masked == frozenset()


def test_links_may_be_left_out_alone():
    """Those of bad chips are left out with them, and those that are not sure stay in."""
    topology = Topology.grid("4x4x2", failed="1x1x1@3,3,0", failed_links="0,3,0-0,3,1")
    found = findings(
        Finding("wrong", ((1, 1, 1),), "float32 6 of 6 times"),
        link("wrong", (1, 0, 1), (1, 1, 1)),
        link("silent", (2, 0, 0), (2, 0, 1)),
        link("silent", (0, 0, 0), (0, 1, 0), is_sure=False),
        topology=topology,
    )
    assert (
        found.links_alone
        == found.to_json()["links_alone"]
        == {
            "failed": "1x1x1@3,3,0;1x1x1@1,1,1",
            "failed_links": "0,3,0-0,3,1;2,0,0-2,0,1",
        }
    )
    says = str(found).splitlines()
    assert says[-2] == (
        "to keep both ends of a link: --failed '1x1x1@3,3,0;1x1x1@1,1,1' "
        "--failed-links '0,3,0-0,3,1;2,0,0-2,0,1'; or else:"
    )
    assert says[-1].startswith("--failed '")
    alone = Topology.grid("4x4x2", **found.links_alone)
    assert (alone.num_live, len(alone.failed_links)) == (30, 2)
    assert findings(Finding("wrong", ((1, 2),), "nothing came")).links_alone is None


def test_a_chip_with_several_bad_links_is_the_one():
    three = [link("silent", (1, 1), other) for other in ((2, 1), (1, 2))]
    assert findings(*three, link("wrong", (0, 1), (1, 1))).masked == {(1, 1)}


def test_links_of_a_chip_that_is_left_out_cost_nothing_more():
    chip = Finding("wrong", ((1, 1),), "float32 6 of 6 times")
    assert findings(chip, link("wrong", (0, 1), (1, 1))).masked == {(1, 1)}


def test_who_is_not_sure_names_nobody_to_leave_out():
    unsure = [link("silent", (x, 0), (x + 1, 0), is_sure=False) for x in (0, 2)]
    found = findings(*unsure, untried=(((0, 0), (0, 1)),))
    assert found.masked == frozenset()
    assert not found.is_well
    assert "--one-by-one" in str(found)
    assert "1 of 22 links were not tried" in str(found)


def test_links_that_were_not_tried_are_not_well():
    assert not findings(untried=(((0, 0), (0, 1)),)).is_well


def test_json_is_the_same():
    told = json.loads(json.dumps(findings(link("wrong", (0, 0), (1, 0))).to_json()))
    assert told["well"] is False
    assert told["failed"] == "1x1@0,0;1x1@3,3"
    assert told["found"][0]["chips"] == [[0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("values", "named"),
    [("aaaa", []), ("aaba", [2]), ("abca", [1, 2]), ("aabb", [0, 1, 2, 3]), ("a", []), ("", [])],
)
def test_the_minority(values, named):
    assert minority(dict(enumerate(values))) == named


def test_slow_is_both_several_times_and_some_seconds_more():
    def found(seconds, **options):
        each = dict(enumerate(seconds))
        return laggards(each, dict.fromkeys(each), **{"slow": 3, "floor": 0.05, **options})

    assert found([0.1, 0.1, 0.1, 0.31]) == {3: 0.1}
    assert found([0.1, 0.1, 0.1, 0.29]) == {}  # not three times
    assert found([0.001, 0.001, 0.001, 0.05]) == {}  # fifty times, and no 50 ms more
    assert found([0.1, 0.9]) == {}  # one peer says nothing
    assert found([0.9, 0.1, 0.1, 0.1], among=[0]) == {0: 0.1}


def test_peers_are_of_one_kind():
    seconds = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 9.0, "e": 9.0, "f": 9.0}
    kinds = dict(zip("abcdef", "111222", strict=True))
    assert laggards(seconds, kinds, slow=3, floor=0.1) == {}
