"""What docs/failures.md says of waits is what the source has."""

import ast
import re
from pathlib import Path

import pytest

from ftmesh.cli.main import main
from ftmesh.elastic.heartbeats import PHASES
from ftmesh.elastic.supervisor import Policy

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "failures.md").read_text()
ROWS = re.findall(r"^\| .* \| ([\d.]+) \|(.*)\| `([\w.]+)` \|$", TEXT, re.MULTILINE)

PACKAGES = ("cluster", "health", "launch", "train")
IN_SECONDS = re.compile(r"SECONDS|HEARTBEAT|SHUTDOWN|LIMIT|GRACE|PATIENCE|TIMEOUT|WAIT|INTERVAL")
NO_WAITS = {  # bytes, bytes a second, and a share
    "launch.keeper.LIMIT",
    "launch.keeper.SLOWEST",
    "train.reading.MAX_DAMAGED",
}
PLANTED = {"health.sick"}  # waits there are faults
CALLS = {"sleep", "wait", "wait_for", "join", "settimeout", "receive", "within", "Timer"}


def sources():
    for package in PACKAGES:
        for path in sorted((ROOT / "ftmesh" / package).glob("*.py")):
            name = f"{package}.{path.stem}"
            if name not in PLANTED:
                yield name, ast.parse(path.read_text())


def number(node):
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) in (int, float) else None


def waits(name, tree):
    """The constants of a module in seconds: every float, and whole numbers by their names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constant, value = node.targets[0].id, number(node.value)
            is_wait = isinstance(value, float) or (value and IN_SECONDS.search(constant))
            if is_wait and f"{name}.{constant}" not in NO_WAITS:
                yield f"{name}.{constant}", value


def bare(tree):
    """The lines on which something waits for a number that has no name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [word.value for word in node.keywords if re.search("timeout|limit", word.arg or "")]
        if any(map(number, [*given, *(node.args[:1] if called in CALLS else [])])):
            yield node.lineno


def test_every_wait_is_in_the_table_with_its_seconds():
    found = dict(wait for name, tree in sources() for wait in waits(name, tree))
    found |= {f"launch.watch.PHASES.{phase}": seconds for phase, seconds in PHASES.items()}
    found |= {f"launch.supervisor.Policy.{k}": getattr(Policy(), k) for k in ("limit", "backoff")}
    assert sorted((constant, float(seconds)) for seconds, _, constant in ROWS) == sorted(
        found.items()
    )


def test_every_wait_has_a_name():
    assert {name: lines for name, tree in sources() if (lines := list(bare(tree)))} == {}


def test_a_wait_that_is_not_in_the_table_is_found():
    tree = ast.parse("NUMBER = 3\nNAP = 0.5\nHEARTBEAT = 7\nSIZES = (1.0, 2.0)\n")
    assert dict(waits("launch.new", tree)) == {"launch.new.NAP": 0.5, "launch.new.HEARTBEAT": 7}


def test_a_wait_without_a_name_is_found():
    tree = ast.parse(
        "time.sleep(NAP)\ntime.sleep(0.5)\nthread.join(3)\n', '.join(words)\n"
        "connect(timeout=5)\nconnect(at, timeout=LIMIT)\nserve(shutdown_timeout=5)\nx.get('a', 1)\n"
    )
    assert list(bare(tree)) == [2, 3, 5, 7]


@pytest.mark.parametrize("command", ["launch", "doctor"])
def test_the_options_of_the_table_are_those_of_the_command(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage = capsys.readouterr().out
    named = {m for _, option, _ in ROWS for m in re.findall(rf"`{command} (--[\w-]+)`", option)}
    assert named
    for option in named:
        assert f"{option} " in usage


def test_the_options_of_a_run_are_all_told(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    through = capsys.readouterr().out.split("through failures:")[1].split("exit status")[0]
    for option in re.findall(r"^  (--[\w-]+)", through, re.MULTILINE):
        assert option in TEXT, option
