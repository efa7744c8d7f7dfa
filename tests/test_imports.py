"""Modules are imported in one direction, without circles, and planning needs no JAX."""

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
    "memory_checks",
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
    "selftest",
    "",
    "cli",
    "__main__",
]

# Imported without JAX: planning, drawing and the launcher run where there is none.
WITHOUT_JAX = {
    *PACKAGES[: PACKAGES.index("execute")],
    "planning",
    "draw",
    "view",
    "",
    "cli",
}
ALSO_WITHOUT_JAX = {
    "execute.check_lowered",
    "execute.device_schedule",
    "execute.hlo_text",
    "execute.lowering",
    "execute.types",
    "selftest.context",
    "selftest.journal",
    "selftest.report",
    "selftest.supervise",
    "selftest.timing",
}

# Beyond NumPy, JAX and the standard library.
EXTRAS = {
    "matplotlib": {"draw.plots"},
    "scipy": {
        "topology.ranks",
        "cost.round_bounds",
        "algorithms.grouped_flood",
    },  # which JAX brings
    "optax": {
        "optim",
        "planning.bound_collectives",
        "selftest.correctness",
    },  # the second for types
    "flax": {"nn"},
}


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imports(nodes):
    """The ftmesh modules that some statements import, and the other packages."""
    ours, others = set(), set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in submodules if name.removeprefix("ftmesh.") in MODULES]
            names = known if len(known) == len(submodules) else [node.module, *known]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            (ours if top == "ftmesh" else others).add(rest if top == "ftmesh" else top)
    return ours, others


TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
ANYWHERE = {name: imports(ast.walk(tree)) for name, tree in TREES.items()}
AT_ONCE = {name: imports(tree.body) for name, tree in TREES.items()}  # when it is imported


def room(name):
    return name.split(".")[0]


def test_every_package_has_its_place():
    assert {room(name) for name in MODULES} == set(PACKAGES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name):
    ours, _ = ANYWHERE[name]
    here = PACKAGES.index(room(name))
    later = [other for other in ours if PACKAGES.index(room(other)) > here]
    assert not later, f"{name} imports {later}"


def find_circle(graph):
    """A circle of imports, as the names of its modules; None where there is none."""
    done = set()

    def visit(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in graph[name]:
                if circle := visit(other, [*path, name]):
                    return circle
            done.add(name)
        return None

    return next(filter(None, (visit(name, []) for name in sorted(graph))), None)


def test_no_circle_of_imports_of_any_kind():
    # A package's __init__ imports its modules, and is run before them: that is no circle.
    graph = {
        name: {other for other in ours if not name.startswith(f"{other}.") and other != name}
        for name, (ours, _) in ANYWHERE.items()
    }
    assert find_circle(graph) is None


def test_a_planted_circle_is_found():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize(
    "name", sorted(n for n in MODULES if room(n) in WITHOUT_JAX or n in ALSO_WITHOUT_JAX)
)
def test_planning_needs_numpy_alone(name):
    _, others = AT_ONCE[name]
    allowed = {"numpy", *(extra for extra, where in EXTRAS.items() if name in where)}
    assert others - set(sys.stdlib_module_names) <= allowed


@pytest.mark.parametrize("name", sorted(MODULES))
def test_internals_of_jax_are_touched_in_one_place(name):
    source = MODULES[name].read_text()
    assert ("jax._src" in source or "jax.interpreters" in source) == (name == "execute._compat")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_other_packages_than_are_declared(name):
    _, others = ANYWHERE[name]
    extras = {extra for extra, where in EXTRAS.items() if where & {name, room(name)}}
    assert others - set(sys.stdlib_module_names) <= {"jax", "numpy", *extras}


def test_no_module_is_hidden_by_something_else_of_its_name():
    for name in set(MODULES) - {"", "__main__"}:
        package, _, last = f"ftmesh.{name}".rpartition(".")
        importlib.import_module(f"ftmesh.{name}")
        assert isinstance(getattr(importlib.import_module(package), last), types.ModuleType), name


def test_no_class_name_is_used_twice():
    classes = [
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted(classes) == sorted(set(classes))


def test_modules_are_few_and_short():
    lengths = [
        len(path.read_text().splitlines())
        for path in MODULES.values()
        if path.name != "__init__.py"
    ]
    assert len(lengths) <= 170
    assert max(lengths) <= 400


def test_planning_imports_no_jax():
    code = (
        "import sys, ftmesh, ftmesh.cli.main\n"
        "plan = ftmesh.plan(ftmesh.Topology.grid('8x8', failed='2x2@2,2'))\n"
        "assert plan.proof is not None and plan.program\n"
        "print([name for name in sys.modules if name.startswith('jax')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
