"""What the README shows is what the code does."""

import re
from collections import Counter
from pathlib import Path

import pytest

from ftmesh import Topology, planners
from ftmesh.draw import draw_svg, figure

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ROWS = re.findall(r"^\| (\d+x\d+) \| (\S+) \| (\w+) \| (.*) \|$", README, re.MULTILINE)


def test_the_python_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    scope = {}
    for block in blocks:
        exec(block, scope)
    scope["file"].close()


def test_the_command_prints_what_is_shown(capsys):
    from ftmesh.cli import main

    main(["plan", "16x32", "--failed", "4x2@6,14"])
    shown = re.search(r"--svg plan\.svg\n(.*?)\n    verified", README, re.DOTALL)[1]
    assert [line.strip() for line in shown.splitlines()] == [
        line.strip() for line in capsys.readouterr().out.splitlines()[: len(shown.splitlines())]
    ]


@pytest.mark.parametrize(("mesh", "block", "algorithm", "numbers"), ROWS)
def test_the_table_of_rounds(mesh, block, algorithm, numbers):
    cells = [cell.strip() for cell in numbers.split("|")]
    for failed, rounds, share in (("", cells[0], cells[2]), (block, cells[1], cells[3])):
        if not rounds:
            assert algorithm == "two_dim"
            continue
        schedule = planners.schedule(Topology.grid(mesh, failed=failed), algorithm)
        assert schedule.num_rounds == int(rounds)
        half = schedule.phases[: len(schedule.phases) // 2]
        loads = Counter()
        for phase in half:
            loads.update(schedule.link_loads(phase))
        assert f"{max(loads.values()) / schedule.num_chunks:.3f}" == share


def test_the_table_has_all_its_rows():
    assert len(ROWS) == 9


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "figures").glob("*.svg")), ids=str)
def test_the_figures_are_those_of_today(path):
    number = int(path.stem.removeprefix("figure-"))
    assert path.read_text() == draw_svg(figure(number)), "run scripts/figures"
    assert f"docs/figures/{path.name}" in README
