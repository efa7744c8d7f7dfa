"""Files: written whole or not at all; and JSON that tells when it has been damaged."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftmesh.errors import DamagedCheckpointError


def write_whole(path: Path, parts: Iterable[Any], *, by: str = "") -> None:
    """Write bytes to `path`, part after part; before all of it is on the disk, nothing is there.

    `by` tells those apart who may write the same file at once; the last of them is right.
    """
    begun = path.with_name(f".{path.name}{by}.begun")
    try:
        with open(begun, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(begun, path)
    except BaseException:
        begun.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def make_folder(path: Path) -> None:
    """Have a folder there, and its name on the disk."""
    path.mkdir(parents=True, exist_ok=True)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, too."""
    if os.name != "posix":
        return  # elsewhere folders are not opened
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def dump(content: dict[str, Any]) -> str:
    r"""`content` as JSON, which ends with a checksum of what stands before.

    >>> dump({"step": 3})
    '{"step":3,"crc32":590335763}\n'
    """
    text = json.dumps(content, separators=(",", ":"))
    return f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}\n'


def load(raw: bytes, name: str) -> dict[str, Any]:
    """What `dump` made the text of a file of; any other is damaged, by as little as a space."""
    try:
        text = raw.decode()
        content = json.loads(text)
        if isinstance(content, dict):
            content.pop("crc32", None)
            if content and dump(content) == text:
                return content
    except (ValueError, RecursionError):
        pass
    raise DamagedCheckpointError(f"its {name} is damaged")
