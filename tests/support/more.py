"""Tests that take minutes, run on request: ``FTMESH_MORE=1 scripts/test --all``."""

import os

import pytest

more = pytest.mark.skipif(
    "FTMESH_MORE" not in os.environ, reason="takes minutes: set FTMESH_MORE=1 to run it"
)


def more_case(*values):
    """A case of a test that runs on request, where others test the same."""
    return pytest.param(*values, marks=[more, pytest.mark.slow])
