"""The script that fits a device model to the compiler's estimates."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from ftmesh import ArgumentError
from ftmesh.tpu import compiler
from ftmesh.tpu.compile_report import CompileReport
from ftmesh.tpu.compiled_rounds import CompiledLoop
from ftmesh.tpu.estimated_cycles import Cycles, RoundCycles
from tests.support.reporting import run_json

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "fit_device_model")
_loader = SourceFileLoader("fit_device_model", SCRIPT)
script = module_from_spec(spec_from_loader("fit_device_model", _loader))
_loader.exec_module(script)
fit_device_model = script.fit_device_model


def report(rounds, *, payload=1_000_000, packing=9000):
    """A report of loops of (lanes, bytes, cycles)."""
    loops = tuple(
        CompiledLoop(f"loop {i}", lanes, lanes, False, RoundCycles(cycles, 0, (), 5, sent))
        for i, (lanes, sent, cycles) in enumerate(rounds)
    )
    return CompileReport(
        "TPU v6 lite", "4x4", "ring", 16, False, payload, "", 0.0, 0, 0, loops, "", Cycles(packing)
    )


def test_an_exact_model_is_recovered():
    sizes = [(lanes, sent) for lanes in (1, 2, 4) for sent in (10_000, 300_000, 8_000_000)]
    exact = [(lanes, sent, round(700 + 2100 * lanes + 0.004 * sent)) for lanes, sent in sizes]
    fit = fit_device_model([report(exact[:5]), report(exact[5:], payload=10**7, packing=90_000)])
    assert fit.per_round == pytest.approx(700, rel=0.01)
    assert fit.per_lane == pytest.approx(2100, rel=0.01)
    assert fit.per_byte == pytest.approx(0.004, rel=0.01)
    assert fit.packing == pytest.approx(0.009)
    assert fit.worst_error < 1e-3


def test_no_parameter_is_negative():
    # With 7,000 a lane and 0.0025 a byte, a round would cost -8,000.
    rounds = [(2, 400_000, 7000), (2, 800_000, 8000), (4, 400_000, 21_000)]
    fit = fit_device_model([report(rounds)])
    assert (fit.per_round, fit.per_byte) == (0.0, 0.0)
    lanes = [lanes for lanes, _, _ in rounds]
    cycles = [c for _, _, c in rounds]
    best = sum(lanes) / sum(n * n / c for n, c in zip(lanes, cycles, strict=True))
    assert fit.per_lane == pytest.approx(best)


def test_a_fit_reports_its_errors():
    fit = fit_device_model([report([(2, 400_000, 10_000), (2, 400_000, 12_000)])])
    # Both have the same lanes and bytes; their weights are 10 and 12.
    assert fit.worst_error == pytest.approx(1 / 11)
    lines = str(fit).splitlines()
    assert lines[1].split()[-5:] == ["2", "400", "kB", "10,000", "10,909"]
    assert lines[-1].endswith("errors up to 9%")


def test_nothing_to_fit():
    with pytest.raises(ArgumentError, match="no estimates to fit"):
        fit_device_model([report([])])


def test_bad_input_gets_one_line_and_a_status(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fit_device_model", "16x16"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "'16x16' is not a TPU slice" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    not compiler.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)
def test_a_device_model_is_fitted():
    fit = run_json(SCRIPT, "v6e:4x4", "--failed", "2x2@0,0", "--json")
    assert {compiled["lanes"] for compiled in fit["rounds"]} == {2, 4}
    assert fit["per_round"] + 2 * fit["per_lane"] > 1000
    assert 1e-4 < fit["per_byte"] < 0.1
    assert 1e-4 < fit["packing"] < 0.1
