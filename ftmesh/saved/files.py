"""Files of checkpoints: folders that are on the disk; JSON that tells when it was damaged."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from ftmesh.errors import DamagedCheckpointError
from ftmesh.files import sync_folder


def make_folder(path: Path) -> None:
    """Have a folder there, and its name on the disk."""
    path.mkdir(parents=True, exist_ok=True)
    sync_folder(path.parent)


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
