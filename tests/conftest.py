"""Settings for all tests: 64 emulated devices, no FTMESH_* variables, no deadlines.

Modules that compile much and compute little use `quick_compiler`.
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
import jaxlib.version
import pytest
from hypothesis import settings

from ftmesh.cli.main import main
from tests.support.on_devices import plan_on_cpu

FLAGS = os.environ["XLA_FLAGS"]
if jaxlib.version.__version_info__ < (0, 11):  # XLA for CPUs compiles in three quarters of the time
    os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_cpu_use_fusion_emitters=false"
    jax.devices()  # reads the flags
    os.environ["XLA_FLAGS"] = FLAGS  # other processes, and libtpu, may not know that one

settings.register_profile("ftmesh", deadline=None, derandomize=True)
settings.load_profile("ftmesh")


@pytest.fixture(autouse=True)
def no_environment_variables(monkeypatch):
    for name in set(os.environ) - {"FTMESH_CACHE_DIR"}:
        if name.startswith("FTMESH_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capsys):
    """Run an ftmesh command in this process; returns its status, stdout and stderr."""

    def call(*argv):
        try:
            status = main(argv)
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def twelve():
    """A plan for twelve devices around a hole in the corner; four chips own nothing."""
    return plan_on_cpu("row_pair", "4x4", "2x2@0,0")


@pytest.fixture(scope="session")
def even():
    """A plan for the same devices, in which all own the same amount."""
    return plan_on_cpu("ring", "4x4", "2x2@0,0")


@pytest.fixture
def unprinted(monkeypatch):
    """Make JAX fail to print compiled programs, as with a newer compiler; returns the error."""
    message = "INTERNAL: async-update instruction should have 1 operands but sees 4"

    def as_text(_program):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Compiled, "as_text", as_text)
    return message


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory):
    """Compile with few optimizations, and cache compiled programs within a module."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="session")
def default_signal_handlers():
    """Restore handlers of signals that a shell ignores for background jobs."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, handler)
