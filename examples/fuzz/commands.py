"""Cases of the fuzzer: command lines of plain and hostile words, and environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np

import ftmesh
from examples.bert import make_records, pack_records
from examples.bert import train as bert
from examples.fuzz.running import Work, WrongError
from examples.resnet50 import train as resnet50
from ftmesh.cli.main import main
from ftmesh.planning import selection
from ftmesh.schedule.files import dumps

Rng = np.random.Generator
Main = Callable[[Sequence[str]], int]

GRIDS = (
    "4x4", "8x8", "6x4", "4x8", "1x8", "8", "2x2", "4x4x2", "5x5", "3x3", "1x1", "2x3x2"
)  # fmt: skip
MESHES = (*GRIDS, "v6e:4x4", "v5p:2x2x1", "v99:4x4")
BLOCKS = (
    "1x1@0,0",
    "1x1@1,0",
    "2x2@0,0",
    "2x2@2,2",
    "1x1@1,1",
    "2x1@0,2",
    "2x2@0,0;1x1@3,3",
    "",
    "4x4@0,0",
)
NUMBERS = ("0", "1", "2", "3", "-1", "1.5", "nan", "inf", "1e9", "9" * 5000, "99999999999", "٣", "")
SIZES = ("1", "4KB", "100MB", "64KiB", "0", "-5", "1zb", "9" * 400, "100Mb", "1e3", "9999999GB")
RATES = ("50GB/s", "1B/s", "50Gb/s", "0B/s", "fast", "1e9", "9" * 400 + "GB/s", "50GB/h", "/s")
TIMES = ("1us", "0.5ms", "8h", "90d", "0s", "-1s", "9" * 400 + "d", "1 fortnight", "nan", "3000d")
HOSTILE = (
    "", " ", "-", "--", "'", '"', "\n", "\t", "\x1b[31m", "\x07", "é", "日本", "😀", "%s", "{0}",
    "../..", "/", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "x" * 5000, "0x10",
    "4X4", "4x", "x4", "4x4x4x4", "1000x1000", "1000000x1", "0x0", "٤x٤", "1x1@-1,0", "2x2@9,9",
    "2x2@", "@", ";;;", "0,0-0,1", "0,0-3,3", "a-b", "$(touch hacked)", "`touch hacked`", "; ls",
)  # fmt: skip
FILES = ("a.npz", "b.svg", "a.svg", "./a.npz", "no/such/a.npz", "folder", ".", "plan.npz", "-")
ALGORITHMS = (*selection.ALGORITHMS, "worst", "")

MESH: dict[str, Sequence[str]] = {
    "--failed": BLOCKS, "--failed-links": ("", "0,0-1,0", "0-1"),
    "--wrap": ("", "x", "xy", "z", "none"),
}  # fmt: skip
NETWORK: dict[str, Sequence[str]] = {
    "--tpu": ("v3", "v6e", "v99"), "--link": RATES, "--latency": TIMES, "--overhead": TIMES
}  # fmt: skip
TILE: dict[str, Sequence[str]] = {"--tile": ("2x1", "2x2", "3x3", "0x1", "9x9")}
PLANNING: dict[str, Sequence[str]] = {"--algorithm": ALGORITHMS, "--payload": SIZES}
COMMANDS: dict[str, tuple[Sequence[str], dict[str, Sequence[str]]]] = {
    "plan": (
        MESHES,
        MESH | NETWORK | TILE | PLANNING
        | {"--out": FILES, "--svg": FILES, "--round": NUMBERS, "--json": (), "--explain": ()},
    ),
    "verify": (
        (*FILES, "missing.npz", "/dev/zero"),
        {"--router": ("around", "dimension_order", "none"), "--json": ()},
    ),
    "draw": (
        (*MESHES, *FILES),
        MESH | TILE | {"--algorithm": ALGORITHMS, "--phase": NUMBERS, "--round": NUMBERS,
                       "--lane": NUMBERS, "--half": NUMBERS, "--figure": NUMBERS, "--svg": FILES},
    ),
    "simulate": (MESHES, MESH | NETWORK | TILE | PLANNING | {"--plot": FILES, "--json": ()}),
    "limits": (MESHES, MESH | NETWORK | TILE | {"--payload": SIZES, "--json": ()}),
    "advise": (
        ("4x4", "8x8", "1x8", "1x1"),
        MESH | NETWORK
        | {"--payload": SIZES, "--mtbf": TIMES, "--repair": TIMES, "--checkpoint": TIMES,
           "--step": TIMES, "--restart": TIMES, "--spares": NUMBERS, "--horizon": TIMES,
           "--runs": NUMBERS, "--seed": NUMBERS, "--json": ()},
    ),
    "view": (
        (*MESHES, "a.npz"),
        MESH | NETWORK | PLANNING
        | {"--out": ("a.html", "no/a.html", "folder"), "--devices": NUMBERS},
    ),
    "compile": (("v6e:4x4", "v99:4x4", "4x4", ":"), PLANNING | {"--failed": BLOCKS}),
}  # fmt: skip
TINY = ("2x2", "1x2", "2", "1x1", "0x2", "1000x1000", "2x", "")  # meshes to compute on
PAYLOADS = (
    "4KB", "1KB", "4KB,64B", "256B", "1KiB", "", ",", "0", "-5", "1zb", "900TB", "9" * 400, "4KB,",
    "٣KB",
)  # fmt: skip
BENCH: dict[str, Sequence[str]] = {
    **MESH, "--algorithms": ("ring", "tree,chain", "auto", ""), "--kernel": (), "--json": ()
}  # fmt: skip
NO_PROGRAM = "/no/such"  # does not exist, so nothing is started
LAUNCH: dict[str, Sequence[str]] = {
    "--mesh": ("2x2", "4x1", "4x4", "3x", ""), "--grace": NUMBERS, "--timeout": NUMBERS,
    "--failures": NUMBERS, "--restart": (), "--host-shape": ("2x1", "1x2", "3x3", "0x1", "4"),
    "--collective-limit": NUMBERS, "--strikes": NUMBERS, "--backoff": NUMBERS,
    "--grow-back": NUMBERS, "--run-dir": ("run", "a.npz", "a.npz/in", "/proc/run"),
    "--limits": ("compile=60", "start=5,save=1", "compile", "compile=nan", "fly=1", "=", ",,"),
    "--events": ("events.jsonl", "folder", "no/such/e", "/proc/e", "x" * 300, "/dev/full"),
}  # fmt: skip
UNHEALTHY = 1  # exit status of the doctor
DOCTOR: dict[str, Sequence[str]] = {
    "--failed": ("", "1x1@0,0", "1x1@0,1", "", *BLOCKS), "--json": (),
    "--failed-links": ("", "0,0-1,0", "0-1"),
    "--timeout": ("5", "10", *NUMBERS), "--slow": ("3", "100", *NUMBERS), "--one-by-one": (),
}  # fmt: skip
PROCESSES: dict[str, Sequence[str]] = {
    "--coordinator": ("127.0.0.1:1", "x", ":", "[::1]:9999999"), "--process-id": NUMBERS,
    "--num-processes": NUMBERS,
}  # fmt: skip
FAULTS = ("", "wrong@0,0", "link-wrong@0,0-1,0", "wrong", "wrong@9,9", "@", "fat@0,0", "wrong@٠,0")
TRAINERS: dict[str, tuple[Main, dict[str, Sequence[str]]]] = {
    name: (
        trainer,
        {"--batch": NUMBERS, "--steps": NUMBERS, "--seed": NUMBERS, "--keep": NUMBERS,
         "--mesh": MESHES, "--failed": BLOCKS, "--bucket": SIZES, "--mllog": FILES,
         "--out": ("out", "a.npz", "no/such"), "--checkpoint-dir": ("ckpt", "a.npz"),
         "--max-damaged": NUMBERS, "--algorithm": ALGORITHMS, "--limit": NUMBERS,
         "--preset": ("tiny", "huge"), "--resume": ()},
    )
    for name, trainer in (("resnet50", resnet50.main), ("bert", bert.main))
}  # fmt: skip
RECORDS: dict[str, tuple[Main, dict[str, Sequence[str]]]] = {
    "make_records": (
        make_records.main,
        {"--out": ("out", "a.npz"), "--vocab": FILES, "--passes": NUMBERS, "--every": NUMBERS,
         "--shards": NUMBERS, "--seed": NUMBERS},
    ),
    "pack_records": (
        pack_records.main,
        {"--out": ("out", "folder", "a.npz"), "--most": NUMBERS, "--seed": NUMBERS},
    ),
}  # fmt: skip


def pick(rng: Rng, words: Sequence[Any]) -> Any:
    """Choose one of several."""
    return words[int(rng.integers(len(words)))]


def word(rng: Rng, words: Sequence[str]) -> str:
    """Choose a value for an option, mostly one of the first third, which are plain."""
    kind = rng.random()
    if kind < 0.1:
        return str(pick(rng, HOSTILE))
    return str(pick(rng, words[: -(-len(words) // 3)] if kind < 0.7 else words))


def options(rng: Rng, known: dict[str, Sequence[str]]) -> list[str]:
    """Choose some options, most of them with a plausible value."""
    words: list[str] = []
    for name in rng.permutation(list(known))[: rng.integers(0, 5)]:
        words.append(str(name))
        if known[name]:
            words.append(word(rng, known[name]))
    if rng.random() < 0.05:
        words.insert(int(rng.integers(len(words) + 1)), pick(rng, HOSTILE))
    return words


def command_line(rng: Rng, folder: Path) -> tuple[str, Work]:
    """A command of ftmesh, a trainer or a record tool, with words of all kinds."""
    prepare(folder)
    kind = rng.random()
    if kind < 0.35:
        return trainer_line(rng) if kind < 0.2 else pod_line(rng)
    name = pick(rng, list(COMMANDS))
    targets, known = COMMANDS[name]
    argv = [name, word(rng, targets), *options(rng, known)]
    return repr(argv)[:300], lambda: run_checked(argv)


def trainer_line(rng: Rng) -> tuple[str, Work]:
    """A trainer or record tool, on missing data, so that it never trains."""
    name = pick(rng, [*TRAINERS, *RECORDS])
    run, known = (TRAINERS | RECORDS)[name]
    argv = options(rng, known)
    if name in TRAINERS:
        argv += ["--data", pick(rng, ("nowhere", "folder", "a.npz")), "--emulate", "one"]
    else:
        argv = [pick(rng, ("text.txt", "a.npz", "nowhere", "folder", "/dev/zero")), *argv]
    return repr([name, *argv])[:300], lambda: run(argv)


def pod_line(rng: Rng) -> tuple[str, Work]:
    """A pod of a missing program, so that no process is started."""
    hosts, devices = (word(rng, ("2", "1", "4", "3", "0", *NUMBERS)) for _ in range(2))
    given = ["--hosts", hosts, "--devices-per-host", devices, *options(rng, LAUNCH)]
    argv = ["launch", *given, "--", NO_PROGRAM]
    return repr(argv)[:300], lambda: run_rejected(argv)


def run_rejected(argv: list[str]) -> int:
    """Run a command that must be rejected."""
    status = run_checked(argv)
    if status == 0 and not {"-h", "--help"} & {*argv}:
        raise WrongError("a command that cannot work has succeeded")
    return status


def computed(rng: Rng, folder: Path) -> tuple[str, Work]:
    """The doctor or a benchmark of tiny sums, on emulated devices."""
    prepare(folder)
    faults = ""
    if rng.random() < 0.5:
        argv = ["bench", word(rng, TINY), "--payloads", word(rng, PAYLOADS), "--repeats"]
        argv += [
            word(rng, (*("1", "2", "3") * 3, *NUMBERS)),
            *options(rng, BENCH),
        ]
    else:
        argv = ["doctor", "--emulate", "--mesh", word(rng, TINY), *options(rng, DOCTOR)]
        argv += options(rng, PROCESSES) if rng.random() < 0.1 else []
        faults = word(rng, FAULTS)

    def work() -> int:
        os.environ["FTMESH_SICK"] = faults
        jax.config.update("jax_disable_most_optimizations", True)  # compiles faster
        status = run_checked(argv)
        return 0 if argv[0] == "doctor" and status == UNHEALTHY else status

    return f"{argv} {faults}"[:300], work


def environment(rng: Rng, folder: Path) -> tuple[str, Work]:
    """A plain command with unusual variables, stdout or working folder."""
    prepare(folder)
    values = (*HOSTILE, *BLOCKS, *MESHES, *NUMBERS)
    variables = {
        name: pick(rng, values).replace("\0", "")
        for name in ("FTMESH_FAILED", "FTMESH_MESH", "FTMESH_FAULTS", "FTMESH_SICK", "COLUMNS",
                     "LINES", "TERM", "LANG", "HOME", "TMPDIR", "PYTHONIOENCODING", "NO_COLOR")
        if rng.random() < 0.3
    }  # fmt: skip
    argv = pick(
        rng,
        (["plan", "4x4", "--out", "b.npz"], ["draw", "4x4", "--svg", "b.svg"], ["verify", "a.npz"],
         ["simulate", "4x4"], ["limits", "4x4", "--json"], ["draw", "--figure", "9"]),
    )  # fmt: skip
    trouble = pick(rng, ("", "", "", "stdout full", "stdout closed", "folder gone"))

    def work() -> int:
        os.environ.update(variables)
        if trouble == "stdout full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        elif trouble == "stdout closed":
            os.close(1)
            setattr(sys, "stdout", None)  # noqa: B010 (as Python sets it)
        elif trouble == "folder gone":
            os.mkdir("gone")
            os.chdir("gone")
            os.rmdir("../gone")
        return run_checked(argv)

    return f"{argv} {trouble} {variables}"[:300], work


def prepare(folder: Path) -> None:
    """Create what most commands use: a valid schedule, a folder and a text."""
    (folder / "folder").mkdir()
    (folder / "a.npz").write_bytes(VALID_SCHEDULE)
    (folder / "text.txt").write_text("one two three\nfour five\n\n" * 12)


VALID_SCHEDULE = dumps(ftmesh.plan(ftmesh.Topology.grid("4x4", failed="")).schedule)


def run_checked(argv: list[str]) -> int:
    """Run a command, and check the files it wrote."""
    status = main(argv)
    if os.path.exists("hacked"):
        raise WrongError("an argument was run as a command")
    if status == 0:
        for option in ("--out", "--svg"):
            if option in argv:
                _check_output(option, Path(argv[argv.index(option) + 1]))
    return status


def _check_output(option: str, path: Path) -> None:
    if path.suffix == ".html":
        if not path.read_text().rstrip().endswith("</html>"):
            raise WrongError(f"{path} is not a complete page")
    elif option == "--out":
        ftmesh.load(path)
    elif ElementTree.parse(path).getroot().tag != "{http://www.w3.org/2000/svg}svg":
        raise WrongError(f"{path} is not an SVG file")
