"""Meshes given as slices of a TPU generation, with the wrap links of such slices."""

import json
import re

import pytest

HOLE = ("--failed", "2x2@2,2")
RULE = "v6e slices have wrap links on axes of 16 chips"


def limits(run, *argv):
    status, text, error = run("limits", *argv, "--json")
    assert status == 0, error
    return json.loads(text)


def test_a_slice_has_its_wrap_links_and_its_network(run):
    slice_ = limits(run, "v6e:16x16", *HOLE)
    assert (slice_["mesh"], slice_["wrap"]) == ("16x16", [True, True])
    assert slice_["all_reduce_us"] == pytest.approx(502 * 100 / 86.8, rel=1e-3)
    assert limits(run, "16x16", *HOLE, "--tpu", "v6e") == slice_
    assert limits(run, "v6e:16x16", *HOLE, "--tpu", "v6e") == slice_
    assert limits(run, "16x16", *HOLE, "--tpu", "v6e", "--wrap", "xy") == slice_
    for mesh in ("v6e:16x16", "16x16"):
        without = limits(run, mesh, *HOLE, "--tpu", "v6e", "--wrap", "none")
        assert without["wrap"] == [False, False]
        assert without["all_reduce_us"] == pytest.approx(600 * 100 / 86.8, rel=1e-3)


@pytest.mark.parametrize(
    ("argv", "mesh", "wrap"),
    [
        ("16x16", "16x16", [False, False]),
        ("v6e:8x16", "8x16", [False, True]),
        ("8x16 --tpu v6e --wrap x", "8x16", [True, False]),
        ("16x32 --tpu v3", "16x32", [False, False]),
        ("32x8 --tpu v3", "32x8", [False, False]),
        ("tpu7x:4x4x4", "4x4x4", [True, True, True]),
        ("v4:2x2x4", "2x2x4", [False, False, False]),
        ("v5p:4x4x1 --failed 2x2x1@0,0,0", "4x4", [False, False]),
        ("v5p:4x4x1 --failed 2x2@0,0 --failed-links 3,3,0-3,2,0", "4x4", [False, False]),
        ("4x4x1 --tpu v5p", "4x4x1", [False, False, False]),
    ],
)
def test_meshes_of_commands(run, argv, mesh, wrap):
    shown = limits(run, *argv.split())
    assert (shown["mesh"], shown["wrap"]) == (mesh, wrap)


def test_commands_say_where_wrap_links_come_from(run):
    slice_ = ("v6e:8x16", *HOLE)
    assert f"  {RULE}\n" in run("plan", *slice_, "--algorithm", "ring")[1]
    assert f"  {RULE}\n" in run("simulate", *slice_, "--algorithm", "ring")[1]
    assert f"{RULE}\n" in run("limits", *slice_)[1]
    given = run("plan", *slice_, "--wrap", "none", "--algorithm", "ring")[1]
    assert "ring on 8x16 less 2x2@2,2" in given
    assert "  wrap links as given\n" in given
    assert "wrap links" not in run("plan", "8x16", *HOLE, "--wrap", "y", "--algorithm", "ring")[1]


def test_a_slice_that_may_be_twisted(run):
    text = run("simulate", "v5p:4x4x8", "--algorithm", "two_dim")[1]
    assert "two_dim on 4x4x8 (wrapping in xyz)" in text
    assert "links of 86.3 GB/s" in text
    assert "4x4x8, which may be twisted, is taken as untwisted" in text


def test_slices_are_drawn_and_advised_on(run):
    text = run("draw", "v6e:8x16", "--algorithm", "two_dim", "--phase", "0")[1]
    assert text.startswith("two_dim on 8x16 (wrapping in y)")
    status, text, _ = run("advise", "v6e:8x16", "--runs", "1", "--horizon", "2d", "--step", "20ms")
    assert status == 0
    assert "8x16 (wrapping in y), 32 boards" in text
    assert RULE in text


def test_a_page_of_a_slice(run, tmp_path):
    out = tmp_path / "a.html"
    argv = ("view", "v6e:16x2", "--algorithm", "ring", "--link", "90GB/s", "--out", str(out))
    status, _, error = run(*argv)
    assert status == 0, error
    page = out.read_text()
    assert re.search(r'"options":"--tpu v6e --link 90GB/s"', page)
    assert '"name":"16x2 (wrapping in x)"' in page


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("plan v99:8x8", "'v99' is not a TPU generation: write one of v2, v3, v4, v5e"),
        ("plan :8x8", "'' is not a TPU generation"),
        ("plan v6e:", "'' is not a mesh shape"),
        ("plan v6e:8by8", "'8by8' is not a mesh shape"),
        ("plan v6e:8x8 --tpu v3", "v6e:8x8 is a slice of v6e, and --tpu says v3"),
        ("plan v6e:8x8 --wrap z", "mesh 8x8 has no axis 'z'"),
        ("plan 8x8 --wrap nones", "mesh 8x8 has no axis 'e'; write axes as in 'xy', or 'none'"),
        ("compile v6e:8x8 --wrap z", "mesh 8x8 has no axis 'z'"),
    ],
)
def test_bad_slices(run, argv, says):
    status, out, error = run(*argv.split())
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert says in error


@pytest.mark.parametrize("name", ["v6e:32x32", "v6e:4x4x4", "v3:33x2", "v5e:17x3"])
def test_a_slice_that_no_generation_has(run, name):
    status, _, error = run("limits", name)
    assert status != 0
    assert "is no slice" in error
