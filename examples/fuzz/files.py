"""Files to fuzz: schedules, records, images, checkpoints and text, damaged at random.

What is accepted all the same must be right: schedules are replayed with NumPy, and whatever else is
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
from examples.fuzz.commands import MESHES, SOUND, Rng, checked, pick
from examples.fuzz.running import Work, WrongError
from examples.resnet50.augment import centre_crop, random_crop
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.command_line import ended
from ftmesh.errors import PlanError, RecordError
from ftmesh.schedule.files import dump

NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 255)
VALUES: tuple[Any, ...] = (
    None, True, [], {}, "", "x" * 10_000, "\x1b[2J", -1, 0, 10**30, 1.5, [[0]], [1, 2, 3], [4, 4],
    ["a"], "ring", [[9, 9]], [True, False],
)  # fmt: skip


def damaged(rng: Rng, raw: bytes) -> bytes:
    """Bytes of which some are others, more or fewer."""
    data = bytearray(raw)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(data) + 1))
        match int(rng.integers(6)):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << int(rng.integers(8))
            case 2 if at < len(data):
                data[at] = int(rng.integers(256))
            case 3:
                del data[at:]
            case 4:
                data[at:at] = rng.bytes(int(rng.integers(1, 40)))
            case 5:
                del data[at : at + int(rng.integers(1, 40))]
    return bytes(data)


# Schedules ----------------------------------------------------------------------------------------


def schedule(rng: Rng, folder: Path) -> tuple[str, Work]:
    """A schedule file of which bytes, numbers or words are others."""
    try:
        topology = ftmesh.Topology.grid(pick(rng, MESHES), failed="")
        raw = dump(ftmesh.plan(topology, verify=False, payload_bytes=10_000).schedule)
    except PlanError:
        raw = SOUND
    how = pick(rng, ("bytes", "numbers", "numbers", "meta", "meta", "arrays"))
    if how == "bytes":
        raw = damaged(rng, raw)
    else:
        with np.load(io.BytesIO(raw)) as file:
            arrays = dict(file)
        {"numbers": _other_numbers, "meta": _other_meta, "arrays": _other_arrays}[how](rng, arrays)
        made = io.BytesIO()
        np.savez_compressed(made, **arrays)
        raw = made.getvalue()
    path = folder / "fuzzed.npz"
    path.write_bytes(raw)

    argv = pick(
        rng,
        (["verify", str(path)], ["verify", str(path)], ["draw", str(path)],
         ["view", str(path), "--out", "view.html"]),
    )  # fmt: skip

    def work() -> int:
        status = checked(argv)
        if status == 0 and argv[0] == "verify":
            replay(path)
        return status

    return f"{argv[0]} {how}", work


def _other_numbers(rng: Rng, arrays: dict[str, Any]) -> None:
    for _ in range(int(rng.integers(1, 4))):
        name = pick(rng, [key for key in arrays if key != "meta" and arrays[key].ndim])
        array = arrays[name].copy()
        at = tuple(int(rng.integers(n)) for n in array.shape)
        near = int(array[at]) + 1, int(array[at]) - 1
        likely = rng.random() < 0.6  # a number of the same column may be right in its form
        array[at] = rng.choice(array.ravel()) if likely else pick(rng, (*NUMBERS, *near))
        arrays[name] = array


def _other_meta(rng: Rng, arrays: dict[str, Any]) -> None:
    meta = json.loads(str(arrays["meta"]))
    meta[pick(rng, [*meta, "tile", "chips"])] = pick(rng, VALUES)
    arrays["meta"] = np.array(json.dumps(meta))


def _other_arrays(rng: Rng, arrays: dict[str, Any]) -> None:
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
    """An all-reduce of random numbers by the file alone; every rank must have every sum."""
    with np.load(path) as file:
        arrays = dict(file)
    ranks, chunks = len(arrays["coords"]), json.loads(str(arrays["meta"]))["num_chunks"]
    mine = np.random.default_rng(0).integers(0, 2**40, (ranks, chunks))
    held = mine.copy()
    columns = [arrays[name] for name in ("round", "src", "dst", "chunk", "count", "op")]
    rows = np.stack(columns, axis=1)
    for now in range(int(rows[-1, 0]) + 1):
        this = rows[rows[:, 0] == now]
        read = [held[src, chunk : chunk + count].copy() for _, src, _, chunk, count, _ in this]
        for (_, _, dst, chunk, count, op), value in zip(this, read, strict=True):
            held[dst, chunk : chunk + count] *= op == 0
            held[dst, chunk : chunk + count] += value
    if not (held == mine.sum(axis=0)).all():
        raise WrongError("a schedule was verified that does not sum")


# Records and images -------------------------------------------------------------------------------


def records(rng: Rng, folder: Path) -> tuple[str, Work]:
    """A file of records, or its index, that is damaged: each record is itself or an error."""
    path = folder / "train-00000-of-00001"
    whole = [rng.bytes(int(rng.integers(0, 200))) for _ in range(int(rng.integers(1, 40)))]
    write_records(path, whole)
    Records([path])
    target = pick(rng, [path, folder / ".train.ftmesh-index"])
    target.write_bytes(damaged(rng, target.read_bytes()))

    def read() -> None:
        found = Records(find_shards(folder, "train-*"))
        for index in range(len(found)):
            try:
                data = found[index]
            except RecordError:
                continue
            if data not in whole:
                raise WrongError(f"record {index} was read, and never written")
            if len(found) == len(whole) and target != path and data != whole[index]:
                raise WrongError(f"record {index} is another")

    return target.name, lambda: ended("fuzz", read)


def image(rng: Rng, folder: Path) -> tuple[str, Work]:
    """An image file that is damaged: pixels of the size that is wanted, or an error."""
    kind = pick(rng, ("PNG", "JPEG", "BMP", "WEBP"))
    file = io.BytesIO()
    size = int(rng.integers(1, 60)), int(rng.integers(1, 60))
    pixels = rng.integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    raw = damaged(rng, file.getvalue())
    if rng.random() < 0.3:  # where sizes are written
        data = bytearray(raw)
        data[16:24] = rng.bytes(8)
        raw = bytes(data)

    def crop() -> None:
        for cropped in (centre_crop(raw, 16), random_crop(raw, 16, np.random.default_rng(0))):
            if cropped.shape != (16, 16, 3):
                raise WrongError(f"a crop of shape {cropped.shape}")

    return kind, lambda: ended("fuzz", crop)


# Checkpoints and text -----------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    """What a run would have after a step."""
    return {"w": step + np.arange(50, dtype=np.float32), "b": np.full((3, 2), step, jnp.bfloat16)}


def checkpoint(rng: Rng, folder: Path) -> tuple[str, Work]:
    """Checkpoints of which files are damaged, gone or others: the newest whole one, or a line."""
    damages = [(int(rng.integers(1, 4)), rng.bytes(8)) for _ in range(int(rng.integers(1, 4)))]

    def work() -> int:
        run = Path("run")
        with Checkpoints(run, process=0) as made:
            for step in (1, 2, 3):
                made.save(step, state(step))
        before = {path: path.read_bytes() for path in run.rglob("*.*")}
        for step, seed in damages:
            _damage(run / str(step), np.random.default_rng([*seed]))
        changed = {
            path.parent.name
            for path, raw in before.items()
            if not path.is_file() or path.read_bytes() != raw
        }
        whole = max((step for step in (1, 2, 3) if str(step) not in changed), default=0)
        return ended("fuzz", lambda: restore(whole))

    def restore(whole: int) -> None:
        with Checkpoints("run", process=0, resume=True, say=lambda line: None) as found:
            step, restored = found.restore(state(0))
        if step != whole:
            raise WrongError(f"step {step} was restored, and {whole} is the newest whole one")
        for name, array in state(step).items():
            if step and not np.array_equal(np.asarray(restored[name]), array):
                raise WrongError(f"{name} of step {step} is another")

    return f"{[step for step, _ in damages]}", work


def _damage(folder: Path, rng: Rng) -> None:
    """Damage a checkpoint, if it is still there."""
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
            for each in files:
                each.unlink()
        case 2:
            path.write_bytes(pick(rng, files).read_bytes())
        case _:
            path.write_bytes(damaged(rng, path.read_bytes()))


def text(rng: Rng, folder: Path) -> tuple[str, Work]:
    """Text of all kinds to make records of: all of them, or a line."""
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
            raise WrongError("records of a text that was refused")
        return status

    return f"{len(raw)} bytes", work
