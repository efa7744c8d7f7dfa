"""Files are written atomically, and outputs are checked before work."""

import argparse
import contextlib
import io
import os
import stat
import sys
import threading
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import ftmesh
from examples.common.arguments import add_run, check_run
from examples.llm.checkpoints import open_manager
from ftmesh.checkpoint import Checkpoints
from ftmesh.checkpoint.restore import read_tensors
from ftmesh.cli.main import main
from ftmesh.cost.profile import Profile
from ftmesh.draw import plots
from ftmesh.elastic.elastic_group import SINGLE_PROCESS
from ftmesh.errors import ArgumentError
from ftmesh.files import (
    check_local,
    check_output_files,
    check_output_folder,
    read_bounded,
    write_atomic,
    write_text,
)

FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_old_content_stays_until_the_new_is_complete(tmp_path):
    path = tmp_path / "a.svg"
    write_text(path, "old")
    seen = []

    def parts():
        yield b"new"
        seen.append((path.read_text(), len(names(tmp_path))))

    write_atomic(path, parts())
    assert seen == [("old", 2)]
    assert path.read_text() == "new"
    assert names(tmp_path) == ["a.svg"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_changes_nothing(tmp_path, error):
    path = tmp_path / "a"
    write_text(path, "old")

    def parts():
        yield b"new"
        raise error

    with pytest.raises(type(error)) as caught:
        write_atomic(path, parts())
    if isinstance(error, OSError):
        assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_many_writers_of_one_file(tmp_path):
    path, texts = tmp_path / "a", [str(n) * 100_000 for n in range(8)]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["a"]


def test_links_are_followed_and_permissions_are_the_default(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "x"
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("there", "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444, 0o755])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(mode)
    seen = []

    def parts():
        (temporary,) = tmp_path.glob(".a.*.begun")
        seen.append(stat.S_IMODE(temporary.stat().st_mode))  # before anything is written
        yield b"new"

    write_atomic(path, parts())
    assert seen == [mode]
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", mode)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_follows_the_umask(tmp_path, mask):
    old_mask = os.umask(mask)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


def test_the_longest_names(tmp_path):
    write_text(tmp_path / ("é" * 127), "x")
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize("other", ["a", "./a", "b/../a", "link"])
def test_one_file_cannot_be_two_outputs(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ArgumentError, match="a cannot be two outputs at once"):
        check_output_files("a", other)
    check_output_files("a", "c", None)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/a", "there is no folder"),
        ("file/a", "there is no folder"),
        ("folder", "it is a folder"),
        ("pipe", "it is not a file"),
        ("/proc/a", "cannot write /proc/a"),
        ("x" * 300, "too long"),
    ],
)
def test_outputs_that_cannot_be_written(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=message):
        check_output_files(path)
    assert names(tmp_path) == ["file", "folder", "pipe"]


def test_output_folders(tmp_path):
    (tmp_path / "file").touch()
    check_output_folder(tmp_path / "new" / "newer")
    check_output_folder(None)
    for path in (tmp_path / "file", tmp_path / "file" / "in", "/proc/new", tmp_path / ("x" * 300)):
        with pytest.raises(ArgumentError, match="cannot write to"):
            check_output_folder(path)
    assert names(tmp_path) == ["file"]


def test_read_bounded(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    assert read_bounded(tmp_path / "a", 3) == b"123"
    with pytest.raises(OSError, match="longer than 2 bytes"):
        read_bounded(tmp_path / "a", 2)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(OSError, match="it is not a file"):
            read_bounded(path, 10)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "b", 3)


@pytest.mark.parametrize(
    "path", ["gs://bucket/run", "s3://b", "file:///tmp/x", Path("gs://bucket/run"), "a+b-c.1:/x"]
)
def test_urls_are_no_local_paths(path):
    with pytest.raises(ArgumentError, match=r"://.* is a URL, and only local or mounted folders"):
        check_local(path)


@pytest.mark.parametrize(
    "path", ["", "run", "./gs:/run", "/gs://run", "C:/run", "a:b", b"gs://run"]
)
def test_local_paths(path):
    check_local(path)


PLAN = ftmesh.plan(ftmesh.Topology.grid("2x2"), "ring")
URL = "gs://bucket/run"


def command(line):
    """Run a command, and raise what it prints for a bad command line."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        status = main(line.split())
    if status == ArgumentError.status:
        raise ArgumentError(printed.getvalue())


def trainer(option):
    parser = argparse.ArgumentParser()
    add_run(parser, ["tiny"])
    check_run(parser.parse_args([option, URL]))


@pytest.mark.parametrize(
    "use",
    [
        lambda: Checkpoints(URL),
        lambda: Checkpoints(Path(URL)),
        lambda: read_tensors(URL),
        lambda: ftmesh.save(PLAN.schedule, URL),
        lambda: ftmesh.load(URL),
        lambda: ftmesh.plan(PLAN.topology, link=f"{URL}.json"),
        lambda: ftmesh.plan(PLAN.topology, link=Path(f"{URL}.json")),
        lambda: Profile.load(URL),
        lambda: plots.save(Figure(), f"{URL}.svg"),
        lambda: write_text(URL, ""),
        lambda: command(f"plan 4x4 --out {URL}"),
        lambda: command(f"draw 4x4 --svg {URL}"),
        lambda: command(f"view 4x4 --out {URL}"),
        lambda: command(f"simulate 4x4 --plot {URL}.svg"),
        lambda: command(f"advise 4x4 --plot {URL}.svg"),
        lambda: command(f"selftest 2x2 --out {URL}"),
        *(
            lambda option=option: command(
                f"launch --hosts 2 --devices-per-host 1 --mesh 2x1 --failures 1 {option} {URL} -- x"
            )
            for option in ("--run-dir", "--events")
        ),
        *(
            lambda option=option: trainer(option)
            for option in ("--checkpoint-dir", "--out", "--mllog", "--data")
        ),
    ],
)
def test_what_takes_a_path_rejects_urls_and_writes_nothing(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=f"{URL}.* is a URL"):
        use()
    assert names(tmp_path) == []


def test_advice_for_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (lambda: Checkpoints(URL), lambda: trainer("--checkpoint-dir")):
        with pytest.raises(ArgumentError, match=r"with orbax.checkpoint.CheckpointManager"):
            use()
    ftmesh.plan(ftmesh.Topology.grid("2x2"))  # what is known already is not looked up again
    monkeypatch.setenv("FTMESH_CACHE_DIR", URL)
    with pytest.raises(ArgumentError, match="set FTMESH_CACHE_DIR to a local folder"):
        ftmesh.plan(ftmesh.Topology.grid("2x2"))
    assert names(tmp_path) == []


@pytest.mark.parametrize("url", ["none://bucket/run", "gs://bucket/run"])
def test_checkpoints_by_orbax_name_the_url_they_cannot_open(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ArgumentError, match=f"cannot open {url}.*that etils.epath takes"):
        open_manager(url, SINGLE_PROCESS, every=1, keep=1)
    assert names(tmp_path) == []
