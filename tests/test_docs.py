"""docs/failures.md lists the timeouts and options that a user can set, with their values."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from ftmesh.cli.main import main
from ftmesh.elastic.heartbeats import PHASE_TIMEOUTS, parse_phase_timeouts

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "failures.md").read_text()
ROWS = re.findall(r"^\| .* \| (\d+) \| `(\S*) ?(--[\w-]+)`.* \|$", TEXT, re.MULTILINE)
CONSTANTS = {
    ("launch", "--collective-limit"): "elastic.supervisor.Policy.collective_timeout",
    ("launch", "--backoff"): "elastic.supervisor.Policy.backoff",
    ("launch", "--grace"): "elastic.local_pod.GRACE_SECONDS",
    ("", "--limit"): "distributed.process_group.TIMEOUT",
    ("doctor", "--timeout"): "health.doctor.TIMEOUT",
}


def constant(name):
    """The value of a constant such as ``elastic.supervisor.Policy.backoff``."""
    package, module, attribute, *rest = name.split(".")
    value = getattr(import_module(f"ftmesh.{package}.{module}"), attribute)
    for field in rest:  # of a dataclass with defaults
        value = getattr(value(), field)
    return value


def test_the_table_has_the_values_of_the_source():
    assert {(command, option) for _, command, option in ROWS} == CONSTANTS.keys()
    for seconds, *option in ROWS:
        assert (option, float(seconds)) == (option, constant(CONSTANTS[*option]))


def test_the_timeouts_of_phases_are_those_of_the_source():
    (text,) = re.findall(r"`--limits (start=[^`]*)`", TEXT)
    assert parse_phase_timeouts(text) == PHASE_TIMEOUTS


@pytest.mark.parametrize("command", ["launch", "doctor"])
def test_options_in_the_table_exist(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage = capsys.readouterr().out
    named = {option for _, name, option in ROWS if name == command}
    assert named
    for option in named:
        assert f"{option} " in usage


def test_options_of_elastic_runs_are_documented(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    options = capsys.readouterr().out.split("fault tolerance:")[1].split("exit status")[0]
    for option in re.findall(r"^  (--[\w-]+)", options, re.MULTILINE):
        assert option in TEXT, option
