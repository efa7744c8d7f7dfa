"""The paper's tables next to ours."""

import json

import pytest

from ftmesh.cli import paper
from ftmesh.cli.main import main
from ftmesh.units import format_time
from tests.support.more import more


@pytest.fixture(scope="module")
def simulated():
    return paper.simulate_runs(rates=(82e9,), modes=("synchronous",))


def test_the_papers_shares_as_ratios():
    assert [round(run.ratio, 2) for run in paper.RUNS] == [1.56, 1.28, 1.28, 1.33]
    for run in paper.RUNS:
        low, high = run.ratio_range
        assert low < run.ratio < high


def test_the_papers_own_efficiencies_follow_from_its_times_but_for_one():
    for run in paper.RUNS:
        full, damaged = (topology.num_live for topology in run.topologies)
        efficiency = run.full_minutes / run.damaged_minutes * full / damaged
        off = abs(efficiency - run.efficiency)
        assert off < (0.02 if (run.benchmark, full) == ("BERT", 512) else 0.006)


def test_ours_is_below_the_papers_with_one_network_for_all_rows(simulated):
    for run, (ours,) in simulated.items():
        assert 1.0 < ours.ratio < run.ratio
        assert ours.ratio == pytest.approx(ours.parts[0] * ours.parts[1])
        assert 0.98 < ours.efficiency < 1.0
        compute = run.step - ours.full
        assert ours.shares[0] == pytest.approx(ours.full / (ours.full + compute))
    same = {run.payload_bytes for run in simulated}
    assert same == {102_228_128, 672_452_216}
    assert len({ours.network for (ours,) in simulated.values()}) == 1


@more
@pytest.mark.slow
def test_the_command_says_where_we_differ_and_what_was_assumed(capsys, simulated):
    assert main(["paper"]) == 0
    text = capsys.readouterr().out
    for run, (ours,) in simulated.items():
        (line,) = [line for line in text.splitlines() if f"{ours.ratio - run.ratio:+.2f}" in line]
        assert f" {run.ratio:.2f} " in line
        assert f" {ours.ratio:.2f} " in line
    for text_of_one in paper.ASSUMPTIONS:
        assert text_of_one.split(";")[0][:40] in text
    assert main(["paper", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [round(row["paper"]["ratio"], 2) for row in rows] == [1.56, 1.28, 1.28, 1.33]
    assert [len(row["ours"]) for row in rows] == [6, 6, 6, 6]
    for row in rows:
        best = row["best"]
        assert 1 < best["ratio"] <= 1.05
        assert (best["full"], best["damaged"]) == ("tree", "tree")
        (ours,) = [
            one
            for one in row["ours"]
            if one["mode"] == "synchronous" and one["link_bytes_per_second"] == 82e9
        ]
        assert best["damaged_us"] < 0.7 * ours["damaged_us"]
        assert f"tree, {format_time(best['damaged_us'] / 1e6)}" in text
