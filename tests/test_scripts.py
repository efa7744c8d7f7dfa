"""The Python scripts can be imported."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPTS = [
    path
    for path in sorted((Path(__file__).parent.parent / "scripts").iterdir())
    if path.is_file() and path.read_text().startswith("#!/usr/bin/env python3")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_can_be_imported(path):
    loader = SourceFileLoader(f"script_{path.name}", str(path))
    script = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(script)
    assert script.__doc__


def test_scripts_are_listed():
    assert {"costs", "figures", "plots", "shown"} <= {path.name for path in SCRIPTS}
