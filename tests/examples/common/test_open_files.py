"""Open files: random access, closing, and silence at exit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.common.records import OpenFile, max_open_files


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    return tmp_path / "file"


@pytest.mark.parametrize("at_once", [True, False])
def test_any_bytes(path, at_once, monkeypatch):
    if not at_once:  # as systems do with reads of more than 2 GiB
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda handle, size, at: pread(handle, min(size, 7), at))
    file = OpenFile(path)
    assert file.read(90, 95) == bytes(range(90, 95))
    assert file.read(0, 100) == bytes(range(100))
    assert file.read(60, 200) == bytes(range(60, 100))  # it ends before
    assert file.read(5, 5) == file.read(100, 120) == b""


def test_without_pread(path, monkeypatch):
    monkeypatch.delattr(os, "pread")
    assert OpenFile(path).read(90, 95) == bytes(range(90, 95))


def test_closed_when_garbage_collected(path):
    file = OpenFile(path)
    handle = file._handle
    os.fstat(handle)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        OpenFile(tmp_path / "nothing")


def test_no_output_at_exit(path):
    code = (
        "import sys\n"
        "from examples.common.records import OpenFile\n"
        "file = OpenFile(sys.argv[1])\n"
        "print(len(file.read(0, 10)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("10\n", "")


def test_max_open_files():
    assert 16 <= max_open_files() <= 4096
