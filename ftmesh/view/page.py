"""The page: one HTML file that holds its style, its program and its scenes, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "words.js",
    "unpack.js",
    "sums.js",
    "places.js",
    "colours.js",
    "filling.js",
    "paint.js",
    "chart.js",
    "player.js",
    "panel.js",
    "main.js",
    "asking.js",
    "events.js",
)


def page(
    scenes: Sequence[dict[str, Any]], *, options: str = "", plans_at: str | None = None
) -> str:
    """The HTML that shows the first of `scenes`, and any other of them on a click.

    `options` are those of the command line that speak of links, for the command that the page tells
    for other damage. With `plans_at`, the address of a `Server`, it asks there instead. The page's
    policy lets the browser run this program, ask that server, and nothing else.
    """
    style = _asset("view.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    shown = {"scenes": list(scenes), "options": options, "plans_at": plans_at}
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
            f"connect-src {'self' if plans_at else 'none'!r}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "policy": policy,
        "style": style,
        "scenes": json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda gap: parts[gap[1]], _asset("view.html"))


def _asset(name: str) -> str:
    return (files("ftmesh.view") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
