"""What is not installed is named, all of it at once, with the extra that brings it."""

import pytest

from ftmesh.errors import FtmeshError, MissingExtraError
from ftmesh.extras import require


def test_nothing_is_said_of_what_is_there():
    require("ftmesh.train", "train", "json", "importlib.util")


def test_all_that_is_missing_is_named():
    with pytest.raises(MissingExtraError) as caught:
        require("ftmesh.train", "train", "no_flax", "json", "no_google.protobuf")
    assert str(caught.value) == (
        "ftmesh.train needs no_flax and no_google.protobuf, which are not installed: "
        "pip install 'ftmesh[train]'"
    )


def test_it_is_caught_as_an_import_error_and_as_one_of_ours():
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(MissingExtraError, FtmeshError)
