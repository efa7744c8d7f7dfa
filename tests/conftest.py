"""Settings for every test: 64 emulated devices, no damage from the environment, no clock.

Modules that compile much and compute little ask for `quick_compiler`.
"""

import os
import signal
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["FTMESH_CACHE_DIR"] = str(
    Path(tempfile.gettempdir()) / f"ftmesh-test-plans-{os.getuid()}"
)
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"

import jax
import pytest
from hypothesis import settings

from ftmesh.cli.main import main
from tests.support.on_devices import planned

settings.register_profile("ftmesh", deadline=None, derandomize=True)
settings.load_profile("ftmesh")


@pytest.fixture(autouse=True)
def nothing_from_environment(monkeypatch):
    for name in set(os.environ) - {"FTMESH_CACHE_DIR"}:
        if name.startswith("FTMESH_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capsys):
    """The command line, in this process: what `ftmesh` returns, prints and complains of."""

    def call(*argv):
        try:
            status = main(argv)
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def twelve():
    """A plan for so many devices around a hole at the corner; four chips own nothing."""
    return planned("row_pair", "4x4", "2x2@0,0")


@pytest.fixture(scope="session")
def even():
    """A plan for the same devices, where each owns as much as any other."""
    return planned("ring", "4x4", "2x2@0,0")


@pytest.fixture
def unprinted(monkeypatch):
    """JAX cannot print what is compiled, as where the compiler is newer than JAX; what it says."""
    said = "INTERNAL: async-update instruction should have 1 operands but sees 4"

    def as_text(_program):
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(jax.stages.Compiled, "as_text", as_text)
    return said


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory):
    """The compiler does not try hard, and what it made of a program serves the same one again."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard():
    """Also where the tests run in the background of a shell that ignores some."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)
