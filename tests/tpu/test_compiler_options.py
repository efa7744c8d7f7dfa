"""Compiler options, slices to compile for, and bad input of the command."""

import re

import pytest

import ftmesh
from ftmesh import ArgumentError, FtmeshError, TopologyError, TopologyWarning
from ftmesh.cli.main import main
from ftmesh.tpu import compiler

FOUR = {"xla_max_concurrent_async_collective_permutes": "4"}
VMEM = "xla_tpu_scoped_vmem_limit_kib"
V6E = {**FOUR, VMEM: "30720"}
SIX = {"xla_max_concurrent_async_collective_permutes": "6"}
ASYNC = {"xla_enable_async_collective_permute": "true"}


@pytest.fixture(autouse=True)
def without_libtpu_arguments(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)


@pytest.mark.parametrize(
    ("platform", "options"),
    [
        ("tpu v6e", V6E), ("v6e", V6E), ("TPU v6 lite", V6E), ("v6e:16x16", V6E),
        ("v6e-256", V6E), ("tpu v5p", SIX), ("TPU v5", SIX), ("tpu7x", SIX), ("v4", SIX),
        ("v2", ASYNC), ("v3:16x32", ASYNC), ("TPU v3", ASYNC),
        ("TPU v5 lite", {}), ("v5litepod-4", {}),
        ("cpu", {}), ("gpu", {}), ("cuda", {}),
    ],
)  # fmt: skip
def test_compiler_options(platform, options):
    assert ftmesh.compiler_options(platform) == options
    extra = ftmesh.compiler_options(platform, overlap=True).items() - options.items()
    is_tpu = platform not in ("cpu", "gpu", "cuda")
    assert extra == ({("xla_tpu_use_aggressive_scheduling", "true")} if is_tpu else set())


def test_libtpu_arguments_in_the_environment_win(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_other=1 --{VMEM}=98304")
    assert ftmesh.compiler_options("v6e") == FOUR
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{VMEM}_of_others=1 --{next(iter(FOUR))}=2")
    assert ftmesh.compiler_options("v6e") == V6E  # a plan needs all of its permutations at once


@pytest.mark.parametrize("platform", ["banana", "", "tpu", "vx"])
def test_an_unknown_platform_is_rejected(platform):
    with pytest.raises(ArgumentError, match=r"is not known: give one of v2, v3, .*v6e, tpu7x, cpu"):
        ftmesh.compiler_options(platform)


@pytest.mark.parametrize("platform", ["TPU v98 lite", "tpu97x", "v96e:4x4"])
def test_a_newer_tpu_gets_no_options_and_one_warning(platform):
    with pytest.warns(TopologyWarning, match=re.escape(repr(platform))) as warned:
        assert [
            ftmesh.compiler_options(platform, overlap=overlap) for overlap in (True, False)
        ] == [{}, {}]
    assert len(warned) == 1
    assert ftmesh.compiler_options(platform) == {}


def test_options_are_a_fresh_dict():
    ftmesh.compiler_options("v6e").clear()
    assert ftmesh.compiler_options("v6e")


def test_missing_libtpu(monkeypatch):
    monkeypatch.setattr(compiler, "has_libtpu", lambda: False)
    with pytest.raises(FtmeshError, match=r"pip install libtpu \(x86_64 Linux only\)"):
        compiler.tpu_devices("v6e:16x16")


@pytest.mark.parametrize("name", ["", "v6e", "16x16", "v6e:16by16", "v6e:999x999", "v6e:4x4 "])
def test_a_bad_slice_is_rejected_before_anything_is_loaded(name):
    with pytest.raises(TopologyError, match=r"is not a TPU slice.*v6e:16x16"):
        compiler.tpu_devices(name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("compile v6e:16x16", "pip install libtpu"),
        ("compile 16x16", "'16x16' is not a TPU slice"),
        ("compile v6e:0x4", "1 or more chips"),
        ("compile v6e:16x16 --payload much", "'much' is not a size"),
        ("compile v6e:16x16 --algorithm fastest", "invalid choice: 'fastest'"),
        ("compile v6e:16x16 --executor mine", "invalid choice: 'mine'"),
        ("compile", "the following arguments are required: SLICE"),
    ],
)
def test_bad_input_gets_one_line_and_a_status(capsys, monkeypatch, argv, says):
    monkeypatch.setattr(compiler, "has_libtpu", lambda: False)
    try:
        status = main(argv.split())
    except SystemExit as stop:
        status = stop.code
    out, error = capsys.readouterr()
    assert (status, out) == (69 if "libtpu" in says else 2, "")
    assert says in error
    assert error.count("\n") == 1
