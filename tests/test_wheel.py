"""The wheel, built and installed into an empty environment: what is in it, and what it asks for.

The environment has the core's dependencies, linked from the one that runs the tests, and no other
package: what an extra would bring is missing there.
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

import ftmesh
from tests.support.pages import ROOT, read_blocks

pytestmark = pytest.mark.slow


def run(*command, **options):
    """What a command prints; nothing of the environment concerns it."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "FTMESH_"))}
    plain.pop("PYTHONPATH", None)
    if find_spec("libtpu"):  # where it is and no TPU, it would look for one at length
        plain["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command, capture_output=True, text=True, env=plain, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def needed(name, found):
    """The distributions that one needs, and it."""
    if name not in found:
        found[name] = distribution(name)
        for line in found[name].requires or ():
            if "extra ==" not in line:
                needed(re.match(r"[\w.-]+", line)[0], found)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def env(wheel, tmp_path_factory):
    """An environment with the wheel, and its folder of packages."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    for name in ("jax", "jaxlib", "numpy"):
        for dist in needed(name, {}).values():
            for top in {file.parts[0] for file in dist.files} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(dist.locate_file(top))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", wheel)
    return folder


def test_what_is_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"ftmesh-{ftmesh.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ftmesh", info}
    assert "ftmesh/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    files = [path.relative_to(ROOT) for path in (ROOT / "ftmesh").rglob("*") if path.is_file()]
    wanted = {str(path) for path in files if "__pycache__" not in path.parts}
    assert wanted == {name for name in names if name.startswith("ftmesh/")}


def test_the_command_plans_and_proves(env, tmp_path):
    command = env / "bin" / "ftmesh"
    assert run(command, "--version") == f"ftmesh {ftmesh.__version__}\n"
    run(command, "plan", "4x4", "--failed", "2x2@0,0", "--out", "plan.npz", cwd=tmp_path)
    assert "exactly once" in run(command, "verify", "plan.npz", cwd=tmp_path)


def test_the_quick_start_runs_first_time(env, tmp_path):
    """Pasted into a file, with nothing set, and nothing but the core installed."""
    blocks = read_blocks((ROOT / "README.md").read_text())
    (start,) = [block.text for block in blocks if block.language == "python"]
    (tmp_path / "start.py").write_text(start)
    printed = run(env / "bin" / "python", "start.py", cwd=tmp_path)
    assert "4x2 less 1x1@3,1" in printed
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5]) / 2


def test_what_is_missing_is_named_with_its_extra(env, tmp_path):
    code = (
        "import ftmesh\n"
        "try:\n"
        "    import ftmesh.train\n"
        "except ImportError as error:\n"
        "    print(ftmesh.__file__, isinstance(error, ftmesh.FtmeshError), error, sep='\\n')\n"
    )
    where, is_ours, said = run(env / "bin" / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(env)
    assert is_ours == "True"
    assert said == "ftmesh.optim needs optax, which is not installed: pip install 'ftmesh[train]'"


def test_a_misspelt_name_is_an_error_to_a_type_checker(tmp_path):
    (tmp_path / "user.py").write_text(
        "import ftmesh, ftmesh.testing, ftmesh.train\n"
        "reveal_type(ftmesh.psum)\n"
        "ftmesh.psm\nftmesh.train.lam\nftmesh.testing.gpu_grid\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", tmp_path / "user.py"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "def (x: Any, axis_name: Any, *" in done.stdout
    wrong = re.findall(r"user.py:(\d+): error: Module has no attribute", done.stdout)
    assert wrong == ["3", "4", "5"], done.stdout
