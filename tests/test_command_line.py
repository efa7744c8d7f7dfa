"""How commands begin and end: numeric bounds, one-line errors, exit statuses."""

import argparse
import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftmesh.cli.main import main
from ftmesh.command_line import (
    BROKEN_PIPE,
    EXIT_STATUS_HELP,
    Parser,
    number,
    one_line,
    run_command,
    whole_number,
)
from ftmesh.errors import (
    USAGE,
    ArgumentError,
    CheckpointNotFoundError,
    DataError,
    PlanError,
    ScheduleNotFoundError,
    VerificationError,
)


def fails(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ArgumentError("no"), 2, "no"),
        (VerificationError("no"), 65, "no"),
        (ScheduleNotFoundError("no"), 66, "no"),
        (CheckpointNotFoundError("no"), 66, "no"),
        (FileNotFoundError(2, "No such file", "a"), 66, "a: No such file"),
        (PlanError("no\n\nway"), 69, "no way"),
        (DataError("\x1b[31mred\x07"), 69, r"\x1b[31mred\x07"),
        (OSError(28, "No space left on device", "a"), 69, "a: No space left on device"),
        (MemoryError(), 69, "not enough memory: ask for less"),
        (RuntimeError("RESOURCE_EXHAUSTED: 4 TB"), 69, "RESOURCE_EXHAUSTED: 4 TB"),
        (ModuleNotFoundError(name="matplotlib"), 69, "pip install 'ftmesh[plots]'"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_user_errors_are_one_line_and_a_status(capsys, error, status, message):
    assert run_command("it", fails(error)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("it: ")
    assert err.endswith(f"{message}\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [KeyError("x"), AssertionError("x"), ModuleNotFoundError(name="y")]
)
def test_a_bug_shows_its_traceback_and_asks_for_a_report(capsys, error):
    assert run_command("it", fails(error)) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("it: this is a bug in ftmesh: please report it")


def test_status_of_the_command_is_returned():
    assert run_command("it", lambda: None) == 0
    assert run_command("it", lambda: 1) == 1


def test_every_status_is_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert EXIT_STATUS_HELP in out
    for status in (0, 1, 2, 65, 66, 69, 70, 130):
        assert f"\n  {status} " in out


def test_long_lines_are_shortened():
    assert one_line("x" * 600) == "x" * 600
    assert len(one_line("x" * 100_000)) < 620


@pytest.mark.parametrize("text", ["0", "11", "-1", "1.0", "ten", "", "9" * 5000, "1e1", "٣"])
def test_numbers_out_of_bounds(text):
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 10") as caught:
        whole_number(1, 10)(text)
    assert len(str(caught.value)) < 100


def test_numbers_in_bounds():
    assert [whole_number(0, 10)(text) for text in ("0", "10", " 7 ", "+3")] == [0, 10, 7, 3]


def test_parser_errors_are_one_line(capsys):
    parser = Parser(prog="it")
    parser.add_argument("--n", type=whole_number(0))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--n", "\x1b[2J" * 1000])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "(see 'it --help')" in err


def shell(command):
    """Run an ftmesh command line in a shell."""
    line = f"{sys.executable} -m ftmesh {command}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)


def test_closed_stdout():
    done = shell("draw --figure 1 >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_reader_that_closes_the_pipe():
    done = shell("draw --figure 3 | head -c 1; wait")
    assert (len(done.stdout), done.stderr) == (1, "")


def test_broken_pipe_is_not_success(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(ClosedPipe(), write_through=True))
    assert run_command("it", lambda: print("chip 1,1 is wrong")) == BROKEN_PIPE


class ClosedPipe(io.RawIOBase):
    def writable(self):
        return True

    def write(self, data):
        raise BrokenPipeError


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9", "x", "", "٣", "1_0", "9" * 5000, "."])
def test_text_that_is_not_a_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number from 0 to 1e"):
        number(0)(text)
    assert [number(0)(text) for text in ("0.5", " 7 ", "+1e2", ".5", "5.")] == [0.5, 7, 100, 0.5, 5]


ROOT = Path(__file__).parent.parent
SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").iterdir())
    if path.is_file() and b"env python" in path.read_bytes()[:40]
]
SOURCES = [*(ROOT / "ftmesh").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *SCRIPTS]


def unbounded_arguments(source):
    """Yield the lines where an argument has a type without bounds."""
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Call) and getattr(
            node.func, "attr", getattr(node.func, "id", "")
        )
        if called in ("add_argument", "option"):
            kinds = [*node.args, *(word.value for word in node.keywords if word.arg == "type")]
            if any(isinstance(kind, ast.Name) and kind.id in ("int", "float") for kind in kinds):
                yield node.lineno


def test_every_numeric_argument_has_bounds():
    unbounded = {path: list(unbounded_arguments(path.read_text())) for path in SOURCES}
    assert not any(unbounded.values()), unbounded


def test_unbounded_argument_is_detected():
    lines = (
        "p.add_argument('--n', type=int)\noption('--s', float, 1.0)\nf.add_argument(type=size)\n"
    )
    assert list(unbounded_arguments(lines)) == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_stdout():
    done = shell("draw --figure 1 > /dev/full")
    assert done.returncode == 69
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_stderr():
    """The status says what a line cannot."""
    assert shell("plan 4x4 --failed 9,9 2> /dev/full").returncode == USAGE
