"""The wheel, built and installed into an empty environment: its files and its dependencies.

The environment has the core's dependencies, linked from the one that runs the tests, and no other
package: what an extra would install is missing there.
"""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ftmesh
from tests.support.pages import ROOT, read_blocks

pytestmark = pytest.mark.slow
CORE = ("jax", "jaxlib", "numpy")


def run(*command, **options):
    """Run a command without JAX's and ftmesh's variables, and return what it prints."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "FTMESH_"))}
    plain.pop("PYTHONPATH", None)
    if find_spec("libtpu"):  # without a TPU, it would search for one at length
        plain["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command, capture_output=True, text=True, env=plain, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def requirements(name, distributions):
    """Add a distribution and those that it requires to `distributions`, and return that."""
    if name not in distributions:
        distributions[name] = distribution(name)
        for line in distributions[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                requirements(requirement.name, distributions)
    return distributions


def link(folder, *names):
    """Link the files of distributions, and of those that they require, into `folder`."""
    for name in names:
        for dist in requirements(name, {}).values():
            for top in {file.parts[0] for file in dist.files} - {"..", "__pycache__"}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(dist.locate_file(top))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def env(wheel, tmp_path_factory):
    """An environment with the wheel and the core's dependencies."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    link(folder / "lib" / version / "site-packages", *CORE)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    python = folder / "bin" / "python"
    run(*pip, "--python", python, "install", "--quiet", "--no-index", wheel)
    return folder


def test_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"ftmesh-{ftmesh.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ftmesh", info}
    assert "ftmesh/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    files = [path.relative_to(ROOT) for path in (ROOT / "ftmesh").rglob("*") if path.is_file()]
    expected = {str(path) for path in files if "__pycache__" not in path.parts}
    assert expected == {name for name in names if name.startswith("ftmesh/")}


def test_the_command_plans_and_verifies(env, tmp_path):
    command = env / "bin" / "ftmesh"
    assert run(command, "--version") == f"ftmesh {ftmesh.__version__}\n"
    run(command, "plan", "4x4", "--failed", "2x2@0,0", "--out", "plan.npz", cwd=tmp_path)
    assert "exactly once" in run(command, "verify", "plan.npz", cwd=tmp_path)


def test_the_quick_start_runs(env, tmp_path):
    """It needs nothing but the core and no settings."""
    blocks = read_blocks((ROOT / "README.md").read_text())
    (start,) = [block.text for block in blocks if block.language == "python"]
    (tmp_path / "start.py").write_text(start)
    printed = run(env / "bin" / "python", "start.py", cwd=tmp_path)
    assert "4x2 less 1x1@3,1" in printed
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5]) / 2


@pytest.mark.parametrize(
    ("module", "package"),
    [("ftmesh.checkpoint", None), ("ftmesh.optim", "optax"), ("ftmesh.nn", "flax")],
)
def test_modules_import_with_their_extra_alone(env, tmp_path, module, package):
    if package is not None:
        link(tmp_path, package)  # from which Python imports, as from any working directory
    code = f"import {module}; print({module}.__file__)"
    printed = run(env / "bin" / "python", "-c", code, cwd=tmp_path)
    assert Path(printed.strip()).is_relative_to(env)


@pytest.mark.parametrize(("module", "package"), [("optim", "optax"), ("nn", "flax")])
def test_a_missing_package_is_named_with_its_extra(env, tmp_path, module, package):
    code = (
        "import ftmesh\n"
        "try:\n"
        f"    import ftmesh.{module}\n"
        "except ImportError as error:\n"
        "    print(isinstance(error, ftmesh.FtmeshError), error)\n"
    )
    assert run(env / "bin" / "python", "-c", code, cwd=tmp_path) == (
        f"True ftmesh.{module} needs {package}, which is not installed: "
        f"pip install 'ftmesh[{module}]'\n"
    )


def test_a_type_checker_finds_misspelt_names(tmp_path):
    (tmp_path / "user.py").write_text(
        "import ftmesh, ftmesh.testing, ftmesh.optim\n"
        "reveal_type(ftmesh.psum)\n"
        "ftmesh.psm\nftmesh.optim.lam\nftmesh.testing.gpu_grid\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", tmp_path / "user.py"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"def \(x: Any, axis_name: [\w.]+, \*", done.stdout), done.stdout
    wrong = re.findall(r"user.py:(\d+): error: Module has no attribute", done.stdout)
    assert wrong == ["3", "4", "5"], done.stdout
