"""The list of planted faults does not rot: what they replace is there, and who should notice."""

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
def test_the_replaced_text_is_there_once_and_so_are_the_tests(fault):
    source = (ROOT / fault.file).read_text()
    changed = faults.planted(fault, source)
    assert changed != source
    ast.parse(changed)
    for test in fault.tests:
        path, *names = test.partition("[")[0].split("::")
        tree = ast.parse((ROOT / path).read_text())
        for name in names:
            (tree,) = [node for node in tree.body if getattr(node, "name", None) == name]


def test_a_text_that_is_gone_is_said_so():
    with pytest.raises(SystemExit, match="its text is 0 times in ftmesh"):
        faults.planted(faults.FAULTS[0], "nothing")


def test_the_list(capsys):
    assert faults.main(["--list", "--only", "checkpoint-of-nan"]) == 0
    assert capsys.readouterr().out.startswith("checkpoint-of-nan: ftmesh/checkpoint/snapshot.py\n")


def test_names_are_different():
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS)
