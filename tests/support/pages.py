"""Pages: the README and what is in docs/, and the code blocks in them.

A block is fenced, and its language says what becomes of it:

    python    run, all of a page in one scope, from top to bottom
    console   a command of `ftmesh` after "$ ", and under it what it prints; "..." is the rest
    diff      lines of tests/loops that change
    text      no code
    {...}     what Sphinx makes of it: names described by their docstrings, or the pages of the site

A comment before the fence says otherwise: `<!-- not run: WHY -->`, or `<!-- slow -->`.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from ftmesh.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS
LANGUAGES = ("python", "console", "diff", "text", "{eval-rst}", "{toctree}")
FENCED = re.compile(
    r"(?:^<!-- (?P<note>[^>]*) -->\n)?^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    """A code block: its language, its text, and what the comment before it says."""

    language: str
    text: str
    note: str

    @property
    def is_run(self) -> bool:
        """Whether it is code that runs, sooner or later."""
        return self.language in ("python", "console") and not self.note.startswith("not run: ")

    @property
    def is_slow(self) -> bool:
        """Whether it runs only where time is taken for it."""
        return self.note == "slow"


def blocks_of(text: str) -> list[Block]:
    """The code blocks of a page."""
    return [
        Block(found["language"], found["text"], found["note"] or "")
        for found in FENCED.finditer(text)
    ]


def commands(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the text that is shown under it."""
    joined = text.replace("\\\n", "")
    parts = re.split(r"^\$ (.*)\n", joined, flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def printed(command: str) -> str:
    """What a command of ftmesh prints, without spaces at the ends of lines."""
    name, *arguments = shlex.split(command, comments=True)
    assert name == "ftmesh", f"only ftmesh is run here, not {name}: say '<!-- not run: WHY -->'"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(arguments)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def is_as_shown(shown: str, found: str) -> bool:
    """Whether a command printed what is shown, in which "..." stands for anything."""
    parts = map(re.escape, shown.strip("\n").split("..."))
    return re.fullmatch("(?s:.*)".join(parts), found.strip("\n")) is not None
