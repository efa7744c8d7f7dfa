"""Parameters of tests that are left out by ``scripts/test``, and run by ``scripts/test --all``."""

import pytest


def slow(*values):
    """Mark a case of a test as slow, where others test the same quickly."""
    return pytest.param(*values, marks=pytest.mark.slow)
