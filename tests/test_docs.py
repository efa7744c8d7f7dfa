"""The timeouts in docs/failures.md are those of the source."""

import ast
import re
from pathlib import Path

import pytest

from ftmesh.cli.main import main
from ftmesh.elastic.heartbeats import PHASE_TIMEOUTS
from ftmesh.elastic.supervisor import Policy

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "failures.md").read_text()
ROWS = re.findall(r"^\| .* \| ([\d.]+) \|(.*)\| `([\w.]+)` \|$", TEXT, re.MULTILINE)

PACKAGES = {
    "distributed": ROOT / "ftmesh" / "distributed",
    "elastic": ROOT / "ftmesh" / "elastic",
    "health": ROOT / "ftmesh" / "health",
    "examples.common": ROOT / "examples" / "common",
}
IN_SECONDS = re.compile(r"SECONDS|HEARTBEAT|SHUTDOWN|LIMIT|GRACE|PATIENCE|TIMEOUT|WAIT|INTERVAL")
NO_TIMEOUTS = {  # bytes per second, and a fraction
    "elastic.peer_store.MIN_CHECKSUM_RATE",
    "examples.common.reader.MAX_DAMAGED",
}
CALLS = {"sleep", "wait", "wait_for", "join", "settimeout", "receive", "within", "Timer"}


def sources():
    for package, folder in PACKAGES.items():
        for path in sorted(folder.glob("*.py")):
            yield f"{package}.{path.stem}", ast.parse(path.read_text())


def number(node):
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) in (int, float) else None


def timeouts(name, tree):
    """Yield the constants of a module in seconds: all floats, and integers by their names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constant, value = node.targets[0].id, number(node.value)
            is_timeout = isinstance(value, float) or (value and IN_SECONDS.search(constant))
            if is_timeout and f"{name}.{constant}" not in NO_TIMEOUTS:
                yield f"{name}.{constant}", value


def unnamed_timeouts(tree):
    """Yield the lines where a call waits for a literal number of seconds."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [word.value for word in node.keywords if re.search("timeout|limit", word.arg or "")]
        if any(map(number, [*given, *(node.args[:1] if called in CALLS else [])])):
            yield node.lineno


def test_every_timeout_is_in_the_table():
    constants = dict(timeout for name, tree in sources() for timeout in timeouts(name, tree))
    constants |= {
        f"elastic.heartbeats.PHASE_TIMEOUTS.{phase}": seconds
        for phase, seconds in PHASE_TIMEOUTS.items()
    }
    constants |= {
        f"elastic.supervisor.Policy.{k}": getattr(Policy(), k)
        for k in ("collective_timeout", "backoff")
    }
    assert sorted((constant, float(seconds)) for seconds, _, constant in ROWS) == sorted(
        constants.items()
    )


def test_every_timeout_has_a_name():
    assert {
        name: lines for name, tree in sources() if (lines := list(unnamed_timeouts(tree)))
    } == {}


def test_missing_timeout_is_detected():
    tree = ast.parse("NUMBER = 3\nNAP = 0.5\nHEARTBEAT = 7\nSIZES = (1.0, 2.0)\n")
    assert dict(timeouts("elastic.new", tree)) == {
        "elastic.new.NAP": 0.5,
        "elastic.new.HEARTBEAT": 7,
    }


def test_unnamed_timeout_is_detected():
    tree = ast.parse(
        "time.sleep(NAP)\ntime.sleep(0.5)\nthread.join(3)\n', '.join(words)\n"
        "connect(timeout=5)\nconnect(at, timeout=LIMIT)\nserve(shutdown_timeout=5)\nx.get('a', 1)\n"
    )
    assert list(unnamed_timeouts(tree)) == [2, 3, 5, 7]


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
