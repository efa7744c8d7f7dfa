"""Modules are imported in one direction, and nothing before the executors needs JAX."""

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ftmesh"

# First to last: a module imports only from its own package and from those above it, also where the
# import stands inside a function or serves types alone.
PACKAGES = [
    "errors",
    "optional_deps",
    "units",
    "files",
    "command_line",
    "memory_limits",
    "topology",
    "schedule",
    "algorithms",
    "cost",
    "execute",
    "layout",
    "collectives",
    "optim",
    "nn",
    "planning",
    "draw",
    "view",
    "tpu",
    "testing",
    "checkpoint",
    "distributed",
    "health",
    "elastic",
    "",
    "cli",
    "__main__",
]
# These need NumPy alone when they are imported; what they import inside functions may need JAX.
WITHOUT_JAX = {
    *PACKAGES[: PACKAGES.index("execute")],
    "planning",
    "draw",
    "view",
    "elastic",
    "cli",
    "",
}
EXECUTE_WITHOUT_JAX = {"lowering", "device_schedule", "check_lowered", "hlo_text"}
EXTRAS = {
    "matplotlib": {"draw.plots"},
    "scipy": {"topology.partners", "cost.round_bounds"},  # which JAX brings
    "jaxlib": {"elastic.coordination_service"},  # alone, so that it starts at once
}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}
JAX_FREE = sorted(
    name
    for name in MODULES
    if name not in WITH_JAX_BEFORE
    and (PACKAGES.index(name.split(".")[0]) < JAX_FROM or name.startswith("cli"))
)


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


GRAPH = {name: imported(path) for name, path in MODULES.items()}


def test_every_package_has_its_place():
    assert {name.split(".")[0] for name in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name):
    ours, _ = GRAPH[name]
    here = PACKAGES.index(name.split(".")[0])
    later = [other for other in ours if PACKAGES.index(other.split(".")[0]) > here]
    assert not set(later) - {other for by, other in DOORS if by == name}, f"{name} imports {later}"


def test_modules_of_a_package_form_no_circle():
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, f"{' imports '.join([*path, name])}"
        if name not in done:
            for other in GRAPH[name][0]:
                is_own_package = name.startswith(f"{other}.")
                if (name, other) not in DOORS and not is_own_package and other != name:
                    visit(other, [*path, name])
            done.add(name)

    for name in sorted(MODULES):
        visit(name, [])


@pytest.mark.parametrize("name", JAX_FREE)
def test_only_numpy_and_the_standard_library(name):
    allowed = {"numpy", *(extra for extra, who in EXTRAS.items() if name in who)}
    assert GRAPH[name][1] - set(sys.stdlib_module_names) <= allowed


@pytest.mark.parametrize("name", sorted(set(MODULES) - set(JAX_FREE)))
def test_internals_of_jax_are_touched_in_one_place(name):
    source = MODULES[name].read_text()
    assert ("jax._src" in source or "jax.interpreters" in source) == (name == "execute._compat")


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[0] not in ("optim", "train")])
def test_the_collectives_need_jax_and_numpy_alone(name):
    allowed = {"jax", "numpy", *(extra for extra, who in EXTRAS.items() if name in who)}
    assert GRAPH[name][1] - set(sys.stdlib_module_names) <= allowed


def test_no_module_is_hidden_by_another_thing_of_its_name():
    for name in set(MODULES) - {"", "__main__"}:
        package, _, last = f"ftmesh.{name}".rpartition(".")
        importlib.import_module(f"ftmesh.{name}")
        assert isinstance(getattr(importlib.import_module(package), last), types.ModuleType), name


def test_planning_imports_no_jax():
    code = (
        "import sys, ftmesh, ftmesh.cli\n"
        "plan = ftmesh.plan(ftmesh.Topology.grid('8x8', failed='2x2@2,2'))\n"
        "assert plan.proof is not None\n"
        "print([name for name in sys.modules if name.startswith('jax')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
