"""Public names: what is exported is in `__all__`, and is there when it is asked for."""

import re
from importlib import import_module
from pathlib import Path

import pytest

MODULES = ("ftmesh", "ftmesh.testing", "ftmesh.train")


@pytest.mark.parametrize("name", MODULES)
def test_what_is_exported_is_named(name):
    module = import_module(name)
    exported = set(re.findall(r" as (\w+)$", Path(module.__file__).read_text(), re.MULTILINE))
    assert set(module.__all__) == exported
    assert module.__all__ == sorted(module.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_there_and_no_other(name):
    module = import_module(name)
    for public in module.__all__:
        assert getattr(module, public) is not None
    with pytest.raises(AttributeError, match="has no attribute 'psm'"):
        _ = module.psm


def test_names_that_need_jax_are_listed_before_they_are_loaded():
    assert {"psum", "plan"} <= set(dir(import_module("ftmesh")))


def test_the_version_is_the_same_wherever_it_is_told():
    root, version = Path(__file__).parent.parent, import_module("ftmesh").__version__
    assert f"\nversion: {version}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## {version}" in (root / "CHANGELOG.md").read_text()
