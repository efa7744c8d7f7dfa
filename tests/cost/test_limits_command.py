"""`ftmesh limits`: where it draws the damage, and what it says in numbers."""

import json

import pytest

from ftmesh.cli.main import main
from ftmesh.cost import round_bounds


@pytest.fixture
def run(capsys):
    def call(*argv):
        try:
            status = main(["limits", *argv])
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return call


def test_the_report_shows_where_the_damage_hurts(run):
    status, text, _ = run("8x8", "--failed", "3x2@1,1", "--payload", "100MB", "--link", "50GB/s")
    assert status == 0
    assert "8x8 less 3x2@1,1: 58 live chips, 95 links, 14 hops across" in text
    assert (
        """\
  x 0 to 5, y 0 to 4
  o-o-o-o-. .
  |
  o X X X . .
  |
  o X X X . .
  |
  . . . . . .
  . . . . . .
o one chip"""
        in text
    )
    assert "at least, for 100 MB over links of 50 GB/s each way, 0.5 us a hop:" in text
    assert "all-gather, or reduce-scatter    983 us" in text
    assert "all-reduce                       1.71 ms" in text
    assert "any of them, by latency alone    7 us" in text
    assert "all-reduce, in rounds            1.73 ms" in text
    assert "all-reduce, in rounds, by trees  1.82 ms" in text


def test_what_would_take_long_is_left_out(run, monkeypatch):
    monkeypatch.setattr(round_bounds, "MAX_CHIPS", 10)
    text = run("4x4")[1]
    assert "in rounds, by trees  not computed: too slow for more than" in text
    assert json.loads(run("4x4", "--json")[1])["all_reduce_trees_us"] is None
    assert "in rounds" not in run("4x4", "--tile", "2x2")[1]


def test_large_parts_are_drawn_with_letters_and_links_over_the_edge(run):
    _, text, _ = run("9x3", "--wrap", "x", "--failed-links", "0,0-0,1;1,0-1,1;2,0-2,1;7,0-8,0")
    assert (
        """\
  o-o-o-. . . . . o-
                  |
  . . . . . . . . .
"""
        in text
    )
    _, text, _ = run("2x8", "--failed", "1x1@0,2")
    assert (
        """\
bottleneck of all-gather:
  x 0 to 1, y 0 to 3
  a a
  a a
    |
  X .
  . .
bottleneck of all-reduce:
  x 0 to 1, y 0 to 4
  a a
  a a
    |
  X o
    |
  . .
  . .
o one chip   a, . groups of chips"""
        in text
    )


@pytest.mark.parametrize("argv", [["16x16"], ["4x4x4", "--failed", "2x1x2@1,0,1"], ["1x1"]])
def test_nothing_is_drawn_where_a_picture_would_not_help(run, argv):
    status, text, _ = run(*argv)
    assert status == 0
    assert "bottleneck of" not in text


def test_limits_as_json(run):
    status, text, _ = run(
        "16x32", "--failed", "4x2@2,2", "--payload", "100MB", "--link", "50GB/s",
        "--latency", "0.5us", "--overhead", "2us", "--json",
    )  # fmt: skip
    found = json.loads(text)
    assert status == 0
    assert (found["live"], found["links"], found["diameter"]) == (504, 954, 46)
    assert found["strength"] == 1.625
    assert found["all_gather_us"] == pytest.approx(2000 * 503 / 1008)
    assert found["all_reduce_us"] == pytest.approx(2000 / 1.625)
    assert found["latency_floor_us"] == pytest.approx(46 * 0.5 + 2)
    assert found["all_reduce_share"] == "8/13"
    assert found["why_all_reduce"].endswith("26 links for 16 joins")
    assert found["all_reduce_us"] < found["all_reduce_rounds_us"] <= found["all_reduce_trees_us"]
    alone = json.loads(run("1x1", "--json")[1])
    assert (alone["strength"], alone["all_reduce_us"]) == (None, 0)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("8x8 --failed 8x2@0,2", "2 parts that no link joins"),
        ("8by8", "'8by8' is not a mesh shape"),
        ("8x8 --failed 2x2@7,7", "is not inside mesh"),
        ("8x8 --payload much", "'much' is not a size"),
        ("8x8 --link fast", "'fast' is not a rate"),
        ("8x8 --link 0GB/s", "bandwidth must be above 0"),
        ("8x8 --latency soon", "'soon' is not a time"),
        ("8x8 --wrap z", "has no axis 'z'"),
        ("", "the following arguments are required: MESH"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(run, argv, says):
    status, out, error = run(*argv.split())
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert says in error
