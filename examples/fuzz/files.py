"""Cases of the fuzzer: schedules, records, images, checkpoints and text, damaged at random.

What is accepted must be correct: schedules are replayed with NumPy, and everything else that is
read is compared with what was written.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from PIL import Image

import ftmesh
from examples.bert import make_records
from examples.common.records import Records, find_shards, write_records
from examples.fuzz.commands import GRIDS, VALID_SCHEDULE, Rng, pick, run_checked
from examples.fuzz.running import Work, WrongError
from examples.resnet50.augment import centre_crop, random_crop
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.command_line import run_command
from ftmesh.errors import PlanError, RecordError
from ftmesh.schedule.files import dumps

NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 255)
VALUES: tuple[Any, ...] = (
    None, True, [], {}, "", "x" * 10_000, "\x1b[2J", -1, 0, 10**30, 1.5, [[0]], [1, 2, 3], [4, 4],
    ["a"], "ring", [[9, 9]], [True, False],
)  # fmt: skip


def damaged(rng: Rng, raw: bytes) -> bytes:
    """Change, insert or remove some bytes."""
    data = bytearray(raw)
    for _ in range(int(rng.integers(1, 4))):
        index = int(rng.integers(len(data) + 1))
        match int(rng.integers(6)):
            case 0 | 1 if index < len(data):
                data[index] ^= 1 << int(rng.integers(8))
            case 2 if index < len(data):
                data[index] = int(rng.integers(256))
            case 3:
                del data[index:]
            case 4:
                data[index:index] = rng.bytes(int(rng.integers(1, 40)))
            case 5:
                del data[index : index + int(rng.integers(1, 40))]
    return bytes(data)


# Schedules ----------------------------------------------------------------------------------------


def schedule(rng: Rng, folder: Path) -> tuple[str, Work]:
    """A schedule file with changed bytes, numbers, metadata or arrays."""
    try:
        topology = ftmesh.Topology.grid(pick(rng, GRIDS), failed="")
        raw = dumps(ftmesh.plan(topology, payload_bytes=10_000).schedule)
    except PlanError:
        raw = VALID_SCHEDULE
    change = pick(rng, ("bytes", "numbers", "numbers", "meta", "meta", "arrays"))
    if change == "bytes":
        raw = damaged(rng, raw)
    else:
        with np.load(io.BytesIO(raw)) as file:
            arrays = dict(file)
        {"numbers": _change_numbers, "meta": _change_meta, "arrays": _change_arrays}[change](
            rng, arrays
        )
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        raw = buffer.getvalue()
    path = folder / "fuzzed.npz"
    path.write_bytes(raw)

    argv = pick(
        rng,
        (["verify", str(path)], ["verify", str(path)], ["draw", str(path)],
         ["view", str(path), "--out", "view.html"]),
    )  # fmt: skip

    def work() -> int:
        status = run_checked(argv)
        if status == 0 and argv[0] == "verify":
            replay(path)
        return status

    return f"{argv[0]} {change}", work


def _change_numbers(rng: Rng, arrays: dict[str, Any]) -> None:
    for _ in range(int(rng.integers(1, 4))):
        name = pick(rng, [key for key in arrays if key != "meta" and arrays[key].ndim])
        array = arrays[name].copy()
        index = tuple(int(rng.integers(n)) for n in array.shape)
        near = int(array[index]) + 1, int(array[index]) - 1
        from_column = rng.random() < 0.6  # another number of the column is often well-formed
        array[index] = rng.choice(array.ravel()) if from_column else pick(rng, (*NUMBERS, *near))
        arrays[name] = array


def _change_meta(rng: Rng, arrays: dict[str, Any]) -> None:
    meta = json.loads(str(arrays["meta"]))
    meta[pick(rng, [*meta, "tile", "chips"])] = pick(rng, VALUES)
    arrays["meta"] = np.array(json.dumps(meta))


def _change_arrays(rng: Rng, arrays: dict[str, Any]) -> None:
    name = pick(rng, list(arrays))
    array = arrays[name]
    changes: tuple[Callable[[], Any], ...] = (
        lambda: array.astype(np.int64) if array.dtype == np.int32 else array,
        lambda: array[..., None],
        lambda: array[:0] if array.ndim else array,
        lambda: array[::-1] if array.ndim else array,
        lambda: np.concatenate([array, array]) if array.ndim else array,
        lambda: np.zeros(0, np.int32),
        lambda: np.array("text"),
        lambda: np.float32(np.nan),
    )
    arrays[name] = pick(rng, changes)()
    if rng.random() < 0.2:
        del arrays[name]


def replay(path: Path) -> None:
    """Replay an all-reduce of random numbers from the file alone, and check every sum."""
    with np.load(path) as file:
        arrays = dict(file)
    ranks, chunks = len(arrays["coords"]), json.loads(str(arrays["meta"]))["num_chunks"]
    inputs = np.random.default_rng(0).integers(0, 2**40, (ranks, chunks))
    buffers = inputs.copy()
    columns = [arrays[name] for name in ("round", "src", "dst", "chunk", "count", "op")]
    rows = np.stack(columns, axis=1)
    for round_index in range(int(rows[-1, 0]) + 1):
        transfers = rows[rows[:, 0] == round_index]
        read = [
            buffers[src, chunk : chunk + count].copy() for _, src, _, chunk, count, _ in transfers
        ]
        for (_, _, dst, chunk, count, op), value in zip(transfers, read, strict=True):
            buffers[dst, chunk : chunk + count] *= op == 0
            buffers[dst, chunk : chunk + count] += value
    if not (buffers == inputs.sum(axis=0)).all():
        raise WrongError("a verified schedule does not compute the sum")


# Records and images -------------------------------------------------------------------------------


def records(rng: Rng, folder: Path) -> tuple[str, Work]:
    """A damaged record file or index: every record is read as written, or is an error."""
    path = folder / "train-00000-of-00001"
    written = [rng.bytes(int(rng.integers(0, 200))) for _ in range(int(rng.integers(1, 40)))]
    write_records(path, written)
    Records([path])
    target = pick(rng, [path, folder / ".train.ftmesh-index"])
    target.write_bytes(damaged(rng, target.read_bytes()))

    def read() -> None:
        records = Records(find_shards(folder, "train-*"))
        for index in range(len(records)):
            try:
                data = records[index]
            except RecordError:
                continue
            if data not in written:
                raise WrongError(f"record {index} was read but never written")
            if len(records) == len(written) and target != path and data != written[index]:
                raise WrongError(f"record {index} is a different one")

    return target.name, lambda: run_command("fuzz", read)


def image(rng: Rng, folder: Path) -> tuple[str, Work]:
    """A damaged image file: pixels of the requested size, or an error."""
    kind = pick(rng, ("PNG", "JPEG", "BMP", "WEBP"))
    file = io.BytesIO()
    size = int(rng.integers(1, 60)), int(rng.integers(1, 60))
    pixels = rng.integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    raw = damaged(rng, file.getvalue())
    if rng.random() < 0.3:  # where a PNG has its size
        data = bytearray(raw)
        data[16:24] = rng.bytes(8)
        raw = bytes(data)

    def crop() -> None:
        for cropped in (centre_crop(raw, 16), random_crop(raw, 16, np.random.default_rng(0))):
            if cropped.shape != (16, 16, 3):
                raise WrongError(f"a crop of shape {cropped.shape}")

    return kind, lambda: run_command("fuzz", crop)


# Checkpoints and text -----------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    """The training state after a step."""
    return {"w": step + np.arange(50, dtype=np.float32), "b": np.full((3, 2), step, jnp.bfloat16)}


def checkpoint(rng: Rng, folder: Path) -> tuple[str, Work]:
    """Checkpoints with damaged, missing or swapped files: the newest intact one, or an error."""
    damages = [(int(rng.integers(1, 4)), rng.bytes(8)) for _ in range(int(rng.integers(1, 4)))]

    def work() -> int:
        run = Path("run")
        with Checkpoints(run, process=0) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(step, state(step))
        before = {path: path.read_bytes() for path in run.rglob("*.*")}
        for step, seed in damages:
            _damage(run / str(step), np.random.default_rng([*seed]))
        changed = {
            path.parent.name
            for path, raw in before.items()
            if not path.is_file() or path.read_bytes() != raw
        }
        intact = max((step for step in (1, 2, 3) if str(step) not in changed), default=0)
        return run_command("fuzz", lambda: restore(intact))

    def restore(intact: int) -> None:
        with Checkpoints("run", process=0, resume=True, log=lambda line: None) as checkpoints:
            step, restored = checkpoints.restore(state(0))
        if step != intact:
            raise WrongError(f"step {step} was restored, but {intact} is the newest intact one")
        for name, array in state(step).items():
            if step and not np.array_equal(np.asarray(restored[name]), array):
                raise WrongError(f"{name} of step {step} is different")

    return f"{[step for step, _ in damages]}", work


def _damage(folder: Path, rng: Rng) -> None:
    """Damage a file of a checkpoint, if it has any."""
    files = sorted(path for path in folder.glob("*") if path.is_file())
    if not files:
        return
    path = pick(rng, files)
    match int(rng.integers(7)):
        case 0:
            path.unlink()
        case 5:
            path.unlink()
            path.mkdir()
        case 6:
            path.unlink()
            os.mkfifo(path)
        case 1:
            for file in files:
                file.unlink()
        case 2:
            path.write_bytes(pick(rng, files).read_bytes())
        case _:
            path.write_bytes(damaged(rng, path.read_bytes()))


def text(rng: Rng, folder: Path) -> tuple[str, Work]:
    """Text of all kinds to make records from: all of them, or an error."""
    words = (
        "one", "two", "three", ".", "a" * 999, "b" * 2000, "é" * 300, "日本語" * 50, "\x00", "\x1b",
        "\u2028", "😀", "x" * 100_000, "�", "\t", "[MASK]", "[SEP]", "##ing",
    )  # fmt: skip
    weights = rng.random(len(words)) ** 8
    lines = []
    for _ in range(int(rng.integers(0, 120))):
        chosen = rng.choice(words, int(rng.integers(0, 12)), p=weights / weights.sum())
        lines.append(" ".join(chosen))
    raw = "\n".join(lines).encode()
    if rng.random() < 0.2:
        raw = damaged(rng, raw)
    (folder / "text.txt").write_bytes(raw)
    shards = str(int(rng.integers(1, 5)))

    def work() -> int:
        argv = ["text.txt", "--out", "out", "--shards", shards, "--every", "2", "--passes", "1"]
        status = make_records.main(argv)
        if status == 0:
            for split in ("train", "validation"):
                Records(find_shards("out", f"{split}-*"), keep=False)
        elif Path("out").exists() and any(Path("out").glob("*-of-*")):
            raise WrongError("records were written for a rejected text")
        return status

    return f"{len(raw)} bytes", work
