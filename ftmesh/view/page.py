"""The page: one HTML file with its style, its scripts and its scenes, which loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_NAMES = "words unpack sums places colours filling paint chart player panel main asking events"
SCRIPTS = tuple(f"{name}.js" for name in _NAMES.split())


def render_page(
    scenes: Sequence[dict[str, Any]], *, options: str = "", plans_at: str | None = None
) -> str:
    """Render the HTML of the page. Its content policy allows its own scripts and that server only.

    Args:
        scenes: From `ftmesh.view.scene`. The first is shown, and the others on a click.
        options: Command line options about links, for the commands that the page suggests.
        plans_at: URL at which a `Server` plans for other damage, if there is one.
    """
    style = _asset("view.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    data = {"scenes": list(scenes), "options": options, "plans_at": plans_at}
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"connect-src {'self' if plans_at else 'none'!r}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = {
        "policy": policy,
        "style": style,
        "scenes": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("view.html"))


def _asset(name: str) -> str:
    return (files("ftmesh.view") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
