"""Numbers and lists in the README and the docs agree with the code."""

import re
from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from ftmesh import Topology
from ftmesh.algorithms import registry
from ftmesh.cli import paper
from ftmesh.cost.links import NETWORKS
from ftmesh.draw import draw_svg, figure
from ftmesh.elastic.run_log import describe_event
from ftmesh.planning import advise
from ftmesh.units import parse_time
from tests.support.pages import PAGES

ROOT = Path(__file__).parent.parent
README = "\n".join(page.read_text() for page in PAGES)
ROWS = re.findall(r"^\| (\d+x\d+) \| (\d\S+) \| (\w+) \| (.*) \|$", README, re.MULTILINE)


@pytest.mark.parametrize(("mesh", "block", "algorithm", "numbers"), ROWS)
def test_table_of_rounds(mesh, block, algorithm, numbers):
    cells = [cell.strip() for cell in numbers.split("|")]
    for failed, rounds, share in (("", cells[0], cells[2]), (block, cells[1], cells[3])):
        if not rounds:
            assert algorithm == "two_dim"
            continue
        schedule = registry.build_schedule(Topology.grid(mesh, failed=failed), algorithm)
        assert schedule.num_rounds == int(rounds)
        half = schedule.phases[: len(schedule.phases) // 2]
        loads = Counter()
        for phase in half:
            loads.update(schedule.link_loads(phase))
        assert f"{max(loads.values()) / schedule.num_chunks:.3f}" == share


@pytest.fixture(scope="module")
def costs():
    """The script that makes tables."""
    loader = SourceFileLoader("costs", str(ROOT / "scripts" / "costs"))
    module = module_from_spec(spec_from_loader("costs", loader))
    loader.exec_module(module)
    return module


def table_page(name):
    """A page that the script wrote."""
    return (ROOT / "docs" / "tables" / f"{name}.md").read_text()


@pytest.mark.slow
def test_table_of_meshes(costs):
    shown = table_page("meshes")
    for shape, failed in costs.MESHES:
        assert f"| {Topology.grid(shape, failed=failed)} | *limit* |" in shown
    assert costs.table(costs.MESHES[:2]) in shown, "run scripts/costs"


def test_table_of_clocks(costs):
    assert table_page("clocks") == costs.page("clocks"), "run scripts/costs"
    assert f"within 15 % of {len(costs.MEASUREMENTS)} public measurements" in " ".join(
        README.split()
    )


@pytest.mark.slow
def test_table_of_slices(costs):
    assert costs.peers(costs.SLICES[:1]) in table_page("slices"), "run scripts/costs"


def test_the_readme_repeats_the_table_of_slices(costs):
    """Milliseconds of 100 MB, and in brackets of 1 MB."""
    peers, rows = {}, {}
    for line in re.findall(r"^\|.*\|$", table_page("slices"), re.MULTILINE)[2:]:
        title, name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if title:
            rows = peers.setdefault(title.partition(" less")[0], {})
        rows[name.strip("*")] = [cell.partition(",")[0].removeprefix(">= ") for cell in cells]
    columns = (
        "`lax.psum`", "`lax.psum` along the ring", "`tree`",
        "the fastest in a kernel, not measured", "`lax.psum` on the whole slice",
    )  # fmt: skip
    repeated = re.findall(r"^  \| (v\w+ [\dx]+) less [^|]*\|(.*)\|$", README, re.MULTILINE)
    assert len(repeated) == 7
    for title, cells in repeated:
        for name, cell in zip(columns, cells.split("|"), strict=True):
            row = peers[title].get(name) or peers[title].get(f"bound of {name}")
            assert bool(cell.strip()) == bool(row)
            for text, at in zip(re.findall(r"[\d.]+", cell), (2, 0), strict=False):
                digits = len(text.partition(".")[2])
                assert float(text) == pytest.approx(
                    1e3 * parse_time(row[at].replace(" ", "")), abs=0.51 * 10**-digits
                )


def test_ratios_compared_with_the_paper():
    for run, (ours,) in paper.simulate_runs(rates=(82e9,), modes=("synchronous",)).items():
        chips = run.topologies[0].num_live
        algorithm, damage = ours.parts
        row = f"| {run.ratio:.2f} | {ours.ratio:.2f} | {algorithm:.2f} x {damage:.2f} |"
        assert f"| {run.benchmark}, {chips} chips {row}" in README


def test_advice():
    here = advise.TrainingJob(
        Topology.grid("16x32", failed=""), mtbf=1.0, repair_time=8 * 3600.0,
        checkpoint_interval=1.0, step_time=0.043,
        network=NETWORKS["v3"],
    )  # fmt: skip
    now = advise.compare_for_damage(here, Topology.grid("16x32", failed="4x2@6,14"))
    around, shrunk = (now.done[name] / 3600 for name in ("fault-tolerant", "largest sub-mesh"))
    text = " ".join(README.split())
    assert f"at {now.speeds['fault-tolerant']:.1%} of full speed" in text
    assert f"does {around:.2f} h of full-mesh work" in text
    assert f"would do {shrunk:.2f} h and waiting none" in text


def test_table_has_all_its_rows():
    assert len(ROWS) == 9


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "figures").glob("*.svg")), ids=str)
def test_figures_are_up_to_date(path):
    number = int(path.stem.removeprefix("figure-"))
    assert path.read_text() == draw_svg(figure(number)), "run scripts/figures"
    assert f"figures/{path.name})" in README


def test_events_are_quoted_as_printed():
    lost = {"host": 2, "process": 2, "chips": "2x2@0,2", "how": "ended by SIGKILL"}
    epoch = {"epoch": 2, "in_place": True, "live": 12, "failed": "2x2@0,2", "from_step": 47}
    text = " ".join(README.split())
    assert f"ftmesh: {describe_event('failed', lost)} " in text
    epoch |= {"source": "devices", "repeated": 0}
    assert f"ftmesh: {describe_event('epoch', epoch)} " in text


def test_every_package_and_script_is_mentioned():
    for path in [*(ROOT / "ftmesh").glob("*/__init__.py"), *(ROOT / "examples").glob("*/train.py")]:
        assert f"{path.parent.name}/ " in README
    for path in filter(Path.is_file, (ROOT / "scripts").iterdir()):
        if path.name not in ("environment", "bench") and not path.name.startswith("reference"):
            assert f"scripts/{path.name}" in README, path.name
