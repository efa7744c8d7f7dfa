"""The README and the pages of docs/, and their code blocks.

The language of a fenced block says how it is tested:

    python    run, all of a page in one scope, from top to bottom
    console   an `ftmesh` command after "$ ", and its output below; "..." stands for the rest
    diff      changes to the files of tests/loops
    text      no code
    {...}     Sphinx directives

A comment before the fence changes that: `<!-- not run: WHY -->`, or `<!-- slow -->`.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from ftmesh.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS
LANGUAGES = ("python", "console", "diff", "text", "{eval-rst}", "{toctree}")
FENCED = re.compile(
    r"(?:^<!-- (?P<note>[^>]*) -->\n)?^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    """A code block: its language, its text, and the comment before it."""

    language: str
    text: str
    note: str

    @property
    def is_run(self) -> bool:
        """True if it is code that the tests run."""
        return self.language in ("python", "console") and not self.note.startswith("not run: ")

    @property
    def is_slow(self) -> bool:
        """True if only the slow tests run it."""
        return self.note == "slow"


def read_blocks(text: str) -> list[Block]:
    """Return the code blocks of a page."""
    return [
        Block(match["language"], match["text"], match["note"] or "")
        for match in FENCED.finditer(text)
    ]


def commands(text: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, with the output shown below each."""
    joined = text.replace("\\\n", "")
    parts = re.split(r"^\$ (.*)\n", joined, flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def output_of(command: str) -> str:
    """Run an ftmesh command; return its output without trailing spaces."""
    name, *arguments = shlex.split(command, comments=True)
    assert name == "ftmesh", f"only ftmesh is run here, not {name}: say '<!-- not run: WHY -->'"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(arguments)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def matches(shown: str, output: str) -> bool:
    """True if the output is as shown, where "..." stands for anything."""
    parts = map(re.escape, shown.strip("\n").split("..."))
    return re.fullmatch("(?s:.*)".join(parts), output.strip("\n")) is not None
