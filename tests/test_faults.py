"""The list of planted faults is up to date: the text to replace and the tests exist."""

import ast
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(path):
    spec = spec_from_loader(path.name, SourceFileLoader(path.name, str(path)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


faults = load(ROOT / "scripts" / "faults")


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_replaced_text_occurs_once_and_tests_exist(fault):
    source = (ROOT / fault.file).read_text()
    changed = faults.planted(fault, source)
    assert changed != source
    ast.parse(changed)
    for test in fault.tests:
        path, *names = test.partition("[")[0].split("::")
        tree = ast.parse((ROOT / path).read_text())
        for name in names:
            (tree,) = [node for node in tree.body if getattr(node, "name", None) == name]


def test_missing_text_is_reported():
    with pytest.raises(SystemExit, match="its text occurs 0 times in ftmesh"):
        faults.planted(faults.FAULTS[0], "nothing")


def test_list(capsys):
    assert faults.main(["--list", "--only", "checkpoint-of-nan"]) == 0
    assert capsys.readouterr().out.startswith("checkpoint-of-nan: ftmesh/checkpoint/snapshot.py\n")


def test_names_are_unique():
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS)
