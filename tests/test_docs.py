"""docs/failures.md lists the timeouts and options that a user can set, with their values."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from ftmesh.cli.main import main
from ftmesh.elastic.heartbeats import PHASE_TIMEOUTS, parse_phase_timeouts

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "failures.md").read_text()
ROWS = re.findall(r"^\| .* \| ([\d.]+) \|(.*)\| `([\w.]+)` \|$", TEXT, re.MULTILINE)


def constant(name):
    """The value of a constant such as ``elastic.supervisor.Policy.backoff``."""
    package, module, attribute, *rest = name.split(".")
    value = getattr(import_module(f"ftmesh.{package}.{module}"), attribute)
    for field in rest:  # of a dataclass with defaults
        value = getattr(value(), field)
    return value


def test_the_table_has_the_values_of_the_source():
    assert ROWS
    for seconds, _, name in ROWS:
        assert (name, float(seconds)) == (name, constant(name))


def test_the_timeouts_of_phases_are_those_of_the_source():
    (text,) = re.findall(r"`--limits (start=[^`]*)`", TEXT)
    assert parse_phase_timeouts(text) == PHASE_TIMEOUTS


@pytest.mark.parametrize("command", ["launch", "doctor"])
def test_options_in_the_table_exist(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage = capsys.readouterr().out
    named = {m for _, option, _ in ROWS for m in re.findall(rf"`{command} (--[\w-]+)`", option)}
    assert named
    for option in named:
        assert f"{option} " in usage


def test_options_of_elastic_runs_are_documented(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    options = capsys.readouterr().out.split("fault tolerance:")[1].split("exit status")[0]
    for option in re.findall(r"^  (--[\w-]+)", options, re.MULTILINE):
        assert option in TEXT, option
