"""A missing package is named, with the extra that installs it."""

import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from ftmesh.errors import FtmeshError, MissingExtraError
from ftmesh.optional_deps import EXTRAS, missing_extra, require

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def test_installed_packages_raise_nothing():
    require("ftmesh.optim", "optim", "json", "importlib.util")


def test_all_missing_packages_are_named():
    with pytest.raises(MissingExtraError) as caught:
        require("ftmesh.nn", "nn", "no_flax", "json", "no_google.protobuf")
    assert str(caught.value) == (
        "ftmesh.nn needs no_flax and no_google.protobuf, which are not installed: "
        "pip install 'ftmesh[nn]'"
    )


@pytest.mark.parametrize(
    ("module", "extra"),
    [("matplotlib.figure", "plots"), ("optax", "optim"), ("flax.linen", "nn"), ("PIL", "examples")],
)
def test_a_failed_import_names_the_extra(module, extra):
    package = module.split(".")[0]
    assert (
        str(missing_extra(ModuleNotFoundError(name=module))) == f"this command needs {package}, "
        f"which is not installed: pip install 'ftmesh[{extra}]'"
    )


def test_a_failed_import_of_another_package_has_no_extra():
    assert missing_extra(ModuleNotFoundError(name="no_such_package")) is None


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_installs_its_packages(extra):
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    requirements = " ".join(project["optional-dependencies"][extra]).lower()
    distributions = packages_distributions()
    for package in EXTRAS[extra]:  # libtpu is not for every machine
        names = distributions.get(package, [package])
        assert any(name.lower() in requirements for name in names), package


def test_it_is_an_import_error_and_an_ftmesh_error():
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(MissingExtraError, FtmeshError)
