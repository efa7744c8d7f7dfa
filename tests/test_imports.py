"""Modules are imported in one direction, and nothing before the executor needs JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ftmesh"

# First to last: a module imports only from modules above it.
WITHOUT_JAX = [
    "errors",
    "notation",
    "units",
    "network",
    "devices",
    "topology",
    "routing",
    "bottleneck",
    "limits",
    "schedule",
    "simulate",
    "replay",
    "verify",
    "planners.scatter",
    "planners.forwarding",
    "planners.ring",
    "planners.two_dim",
    "planners.row_pair",
    "planners",
    "choose",
    "paper",
    "advise",
    "plots",
    "lower",
    "plan",
    "serialize",
    "draw.picture",
    "draw.tracks",
    "draw.text",
    "draw.svg",
    "draw.figures",
    "draw",
    "",
    "cli.arguments",
    "cli.plan",
    "cli.verify",
    "cli.draw",
    "cli.limits",
    "cli.simulate",
    "cli.paper",
    "cli.advise",
    "cli.bench",
    "cli.compile",
    "cli",
    "__main__",
]
WITH_JAX = [
    "_compat",
    "mesh",
    "packing",
    "execute",
    "collectives",
    "testing",
    "bench",
    "compiled",
    "overlap",
    "train.records",
    "train.reading",
    "train.lr_schedules",
    "train.mllog",
    "train.measure",
    "train.shards",
    "train.gradients",
    "train.layerwise",
    "train.elementwise",
    "train.optimizer",
    "train.batches",
    "train.groups",
    "train.batch_norm",
    "train.plain",
    "train.parallel",
    "train.programs",
    "train.checkpoints",
    "train.report",
    "train.arguments",
    "train.loop",
    "train.compile_step",
    "train",
]
ORDER = WITHOUT_JAX + WITH_JAX

# What is imported later on, when a user first asks for something that needs JAX.
DOORS = {
    ("topology", "mesh"),
    ("plan", "collectives"),
    ("cli.bench", "testing"),
    ("cli.bench", "bench"),
    ("cli.compile", "compiled"),
}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imported(path):
    """The ftmesh modules that a file imports anywhere in it, and the other packages."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in submodules if name.removeprefix("ftmesh.") in MODULES]
            names = known if len(known) == len(submodules) else [node.module, *known]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            (ours if top == "ftmesh" else others).add(rest if top == "ftmesh" else top)
    return ours, others


def test_every_module_has_its_place():
    assert sorted(MODULES) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_one_way(name):
    ours, _ = imported(MODULES[name])
    later = [
        other
        for other in ours
        if ORDER.index(other) >= ORDER.index(name) and (name, other) not in DOORS
    ]
    assert not later, f"{name or 'ftmesh'} imports {later}, which comes after it"


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_only_numpy_and_the_standard_library(name):
    _, others = imported(MODULES[name])
    allowed = {"numpy", "matplotlib"} if name == "plots" else {"numpy"}
    assert others - set(sys.stdlib_module_names) <= allowed


@pytest.mark.parametrize("name", WITH_JAX)
def test_internals_of_jax_are_touched_in_one_place(name):
    source = MODULES[name].read_text()
    assert ("jax._src" in source or "jax.interpreters" in source) == (name == "_compat")


def test_planning_imports_no_jax():
    code = (
        "import sys, ftmesh, ftmesh.cli\n"
        "plan = ftmesh.plan(ftmesh.Topology.grid('8x8', failed='2x2@2,2'))\n"
        "assert plan.proof is not None\n"
        "print([name for name in sys.modules if name.startswith('jax')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
