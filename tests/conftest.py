"""Settings for every test: 64 emulated devices, no damage from the environment, no clock."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"

import pytest
from hypothesis import settings

settings.register_profile("ftmesh", deadline=None, derandomize=True)
settings.load_profile("ftmesh")


@pytest.fixture(autouse=True)
def no_failures_from_environment(monkeypatch):
    monkeypatch.delenv("FTMESH_FAILED", raising=False)
