"""The public names exist, are listed, and are in the API reference."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = (
    "ftmesh",
    "ftmesh.checkpoint",
    "ftmesh.collectives",
    "ftmesh.distributed",
    "ftmesh.elastic",
    "ftmesh.health",
    "ftmesh.nn",
    "ftmesh.optim",
    "ftmesh.testing",
)
REFERENCE = (ROOT / "docs" / "api.md").read_text()


def exported(module):
    """The names that the source of a package exports with ``import x as x``."""
    source = Path(module.__file__).read_text()
    return re.findall(r"^ *from .* import (\w+) as \1\b", source, re.MULTILINE)


@pytest.mark.parametrize("name", MODULES)
def test_exported_names_exist_and_are_documented(name):
    module = import_module(name)
    names = exported(module)
    assert len(names) == len(set(names)) > 0
    for public in names:
        assert getattr(module, public) is not None
        listed = (f":: {name}.{public}\n", f":: ftmesh.{public}\n")
        constant = public.isupper()
        assert constant or any(text in REFERENCE for text in listed), f"{name}.{public}"
    with pytest.raises(AttributeError, match="has no attribute 'psm'"):
        _ = module.psm


@pytest.mark.parametrize("name", ["ftmesh", "ftmesh.testing"])
def test_lazy_modules_list_their_names(name):
    module = import_module(name)
    assert set(module.__all__) == set(exported(module))
    assert module.__all__ == sorted(module.__all__)


def test_names_that_need_jax_are_in_dir_before_they_are_loaded():
    assert {"psum", "plan"} <= set(dir(import_module("ftmesh")))


def test_version_is_the_same_everywhere():
    version = import_module("ftmesh").__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
