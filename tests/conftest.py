"""Settings for every test: no damage from the environment, and hypothesis without a clock."""

import pytest
from hypothesis import settings

settings.register_profile("ftmesh", deadline=None, derandomize=True)
settings.load_profile("ftmesh")


@pytest.fixture(autouse=True)
def no_failures_from_environment(monkeypatch):
    monkeypatch.delenv("FTMESH_FAILED", raising=False)
