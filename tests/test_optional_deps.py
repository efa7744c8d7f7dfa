"""What is not installed is named, all of it at once, with the extra that brings it."""

import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from ftmesh.errors import FtmeshError, MissingExtraError
from ftmesh.optional_deps import EXTRAS, missing, require


def test_nothing_is_said_of_what_is_there():
    require("ftmesh.train", "train", "json", "importlib.util")


def test_all_that_is_missing_is_named():
    with pytest.raises(MissingExtraError) as caught:
        require("ftmesh.train", "train", "no_flax", "json", "no_google.protobuf")
    assert str(caught.value) == (
        "ftmesh.train needs no_flax and no_google.protobuf, which are not installed: "
        "pip install 'ftmesh[train]'"
    )


def test_what_is_not_found_when_it_is_imported_is_named_too():
    error = missing(ModuleNotFoundError(name="matplotlib.figure"))
    assert (
        str(error) == "what was asked for needs matplotlib, which is not installed: "
        "pip install 'ftmesh[plots]'"
    )
    assert missing(ModuleNotFoundError(name="no_such_package")) is None


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_package_is_brought_by_the_extra_that_is_named(extra):
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())[
        "project"
    ]
    brought = " ".join(project["optional-dependencies"][extra]).lower()
    distributions = packages_distributions()
    for package in EXTRAS[extra]:  # of which libtpu is not for every machine
        names = distributions.get(package, [package])
        assert any(name.lower() in brought for name in names), package


def test_it_is_caught_as_an_import_error_and_as_one_of_ours():
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(MissingExtraError, FtmeshError)
