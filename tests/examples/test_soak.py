"""The soak: its trainer, the checks of a run, and the table of recoveries."""

import io
import json
import shutil
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.soak import soak, train
from examples.soak.checks import TOLERANCE, Run, check, difference
from examples.soak.pod import Pod
from examples.soak.recoveries import find_recoveries, recovery_table
from ftmesh.testing.fault_spec import parse_faults
from tests.support.more import more

pytestmark = pytest.mark.usefixtures("quick_compiler")
STEPS, BATCH = 6, 4
NUMBER = STEPS * BATCH


def event(time, name, epoch, **more):
    return {"time": time, "event": name, "epoch": epoch, **more}


def write_lines(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


FAULT = {"process": 1, "step": 4, "kind": "kill", "moment": "collective", "text": "kill -9"}
EVENTS = [
    event(100.0, "started", 1, hosts=[0, 1]),
    event(110.5, "failed", 1, host=1, process=1, how="signal 9", step=4, phase="step", chips=[]),
    event(111.0, "epoch", 2, in_place=False, hosts=[0, 1], failed="", from_step=1, source="disk"),
    event(111.5, "failed", 2, host=1, process=1, how="signal 9", step=3, phase="start", chips=[]),
    event(112.0, "epoch", 3, in_place=True, hosts=[0], failed="2x1@0,1", from_step=2, source="x"),
    event(113.0, "goes on", 3, step=3, seconds=2.5, parts={}, repeated=1),
    event(120.0, "done", 3, status=0, steps=STEPS, failures=1, seconds_lost=3, goodput=0.85),
]


@pytest.fixture
def folder(tmp_path):
    """A run of two processes; generation 2 committed nothing; 3, with one, repeated step 3."""
    write_lines(tmp_path / "events.jsonl", EVENTS)
    write_lines(tmp_path / "run" / "faults.jsonl", [event(110.0, "fault", 1, **FAULT)])
    examples = np.random.default_rng(0).permutation(NUMBER).reshape(STEPS, BATCH).tolist()
    for process in (0, 1):
        write_lines(
            tmp_path / "run" / f"used-1-{process}.jsonl",  # step 5 was read ahead
            [used(step, examples[step - 1][process::2]) for step in (2, 1, 3, 4, 5)],
        )
        write_lines(tmp_path / "run" / f"used-2-{process}.jsonl", [used(4, examples[3])])
    lines = [used(step, examples[step - 1]) for step in range(3, STEPS + 1)]
    write_lines(tmp_path / "run" / "used-3-0.jsonl", lines)
    (tmp_path / "out").mkdir()
    np.savez(tmp_path / "out" / "weights.npz", w=np.arange(1.0, 5.0), b=np.ones(2))
    shutil.copy(tmp_path / "out" / "weights.npz", tmp_path / "reference.npz")
    return tmp_path


def used(step, examples):
    return {"step": step, "examples": examples}


def found(folder, status=0, **options):
    run = Run.read(folder, status, "kill@1:4:collective;slow@0:2")
    weights = folder / "reference.npz"
    return check(run, steps=STEPS, num_examples=NUMBER, reference=weights, **options)


def change(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_a_good_run(folder):
    assert found(folder) == []


def test_a_line_cut_short_is_skipped(folder):
    with (folder / "run" / "used-1-1.jsonl").open("a") as file:
        file.write('{"step": 6, "exa')
    assert found(folder) == []


class TestErrors:
    def test_a_status(self, folder):
        assert found(folder, status=1) == ["it ended with status 1"]

    def test_a_hang(self, folder):
        assert found(folder, status=None) == ["it did not end within its limit"]

    def test_no_end(self, folder):
        write_lines(folder / "events.jsonl", EVENTS[:-1])
        assert found(folder) == ["its events do not say that it is done"]

    def test_too_few_steps(self, folder):
        write_lines(folder / "events.jsonl", [*EVENTS[:-1], {**EVENTS[-1], "steps": 5}])
        assert found(folder) == ["it did 5 steps of 6"]

    def test_an_example_used_twice_and_one_missing(self, folder):
        file = folder / "run" / "used-3-0.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        missing, lines[-1]["examples"][0] = lines[-1]["examples"][0], lines[0]["examples"][0]
        write_lines(file, lines)
        assert found(folder) == [
            f"1 examples were not used, the first: [{missing}]",
            f"1 examples were used more than once: [{lines[0]['examples'][0]}]",
        ]

    def test_a_process_that_read_the_examples_of_another(self, folder):
        shutil.copy(folder / "run" / "used-1-0.jsonl", folder / "run" / "used-1-2.jsonl")
        (wrong,) = found(folder)
        assert wrong.startswith("4 examples were used more than once")

    def test_a_step_without_examples(self, folder):
        for process in (0, 1):
            write_lines(folder / "run" / f"used-1-{process}.jsonl", [])
        wrong = found(folder)
        assert wrong[:2] == [
            "no process read examples for step 1 in generation 1",
            "no process read examples for step 2 in generation 1",
        ]
        assert wrong[2].startswith("8 examples were not used")

    @pytest.mark.parametrize(
        ("off", "is_well"), [(TOLERANCE / 2, True), (1e-2, False), (np.nan, False)]
    )
    def test_weights(self, folder, off, is_well):
        np.savez(folder / "out" / "weights.npz", w=np.arange(1.0, 5.0), b=np.ones(2) + off)
        wrong = found(folder)
        assert (wrong == []) == is_well
        assert is_well or "from an undisturbed run's" in wrong[0]

    def test_one_bit_if_the_mesh_did_not_change(self, folder):
        write_lines(
            folder / "events.jsonl",
            [{**each, "failed": ""} if each["event"] == "epoch" else each for each in EVENTS],
        )
        assert found(folder) == []
        np.savez(folder / "out" / "weights.npz", w=np.arange(1.0, 5.0), b=np.ones(2) + 1e-15)
        (wrong,) = found(folder)
        assert "the mesh did not change, so none is allowed" in wrong
        assert found(folder, exact=False) == []

    def test_no_weights(self, folder):
        (folder / "out" / "weights.npz").unlink()
        assert found(folder) == ["it left no weights"]


class TestTable:
    def test_recoveries(self, folder):
        kill, slow = find_recoveries(Run.read(folder, 0, "kill@1:4:collective;slow@0:2"))
        assert (kill.kind, kill.moment, kill.how) == ("kill", "collective", "in place")
        assert (kill.seconds, kill.repeated) == (3.0, 1)
        assert (slow.kind, slow.how, slow.seconds) == ("slow", "silent", None)

    def test_a_run_that_ends_and_one_that_is_not_interrupted(self, folder):
        write_lines(folder / "events.jsonl", EVENTS[:2])
        assert [each.how for each in find_recoveries(Run.read(folder, 1))] == ["ended"]
        write_lines(folder / "events.jsonl", [EVENTS[0], EVENTS[-1]])
        assert [each.how for each in find_recoveries(Run.read(folder, 0))] == ["ran on"]

    def test_another_fault_before_the_recovery(self, folder):
        fault = Run.read(folder, 0).faults[0]
        second = {**fault, "kind": "stuck", "time": fault["time"] + 1}
        write_lines(folder / "run" / "faults.jsonl", [fault, second])
        kill, stuck = find_recoveries(Run.read(folder, 0))
        assert (kill.seconds, kill.hit_again) == (3.0, True)
        assert (stuck.seconds, stuck.hit_again) == (2.0, False)
        assert _as_text([kill, stuck])["all"] == ["2", "2", "2.5", "2.0", "3.0", "1"]

    def test_as_text(self, folder):
        found = find_recoveries(Run.read(folder, 0, "kill@1:4:collective;slow@0:2"))
        lines = _as_text(found * 2)
        assert lines["kill collective"] == ["2", "2", "3.0", "3.0", "1"]
        assert lines["slow step"] == ["2"]
        assert lines["all in place"] == ["2", "2", "3.0", "3.0", "1"]
        assert lines["all restarted"] == []
        assert lines["all"] == ["2", "2", "3.0", "3.0", "1", "2"]


def _as_text(found):
    """The cells of a table, by row."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(recovery_table(found))
    return {line[:16].strip(): line[16:].split() for line in console.export_text().splitlines()}


class StandIn(Pod):
    """Replaces the launcher by a program that is recorded as a worker of the run."""

    program = ""

    def command(self, folder):
        return [sys.executable, "-c", NOTED + self.program]


NOTED = """\
import faulthandler, json, os, pathlib, signal, time
faulthandler.register(signal.SIGUSR1)
run_dir = pathlib.Path(os.environ["FTMESH_RUN_DIR"])
(run_dir / "pids").mkdir()
note = {"kind": "worker", "host": 0, "pid": os.getpid()}
(run_dir / "pids" / "worker-0.json").write_text(json.dumps(note))
print(os.environ.get("FTMESH_FAULTS"), flush=True)
"""


class TestPod:
    @pytest.mark.slow
    def test_a_hang_dumps_stacks_and_is_killed(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FTMESH_RUN_DIR", str(tmp_path / "a" / "run"))

        class Hangs(StandIn):
            program = "def never_comes_back():\n    time.sleep(600)\nnever_comes_back()"

        pod = Hangs(hosts=4, steps=STEPS, failures=1)
        run = pod.train(tmp_path / "a", parse_faults("kill@2:3"), limit=5)
        assert run.status is None
        log = (tmp_path / "a" / "log").read_text()
        assert log.startswith("kill@2:3:step,0.003,1\n")
        assert "in never_comes_back" in log

    def test_the_status_and_no_faults(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FTMESH_RUN_DIR", str(tmp_path / "a" / "run"))
        monkeypatch.setenv("FTMESH_FAULTS", "kill@0:1")

        class Ends(StandIn):
            program = "raise SystemExit(3)"

        run = Ends(hosts=4, steps=STEPS, failures=1).train(tmp_path / "a", limit=60)
        assert run.status == 3
        assert (tmp_path / "a" / "log").read_text() == "None\n"

    def test_the_command(self, tmp_path):
        pod = Pod(hosts=2, steps=60, failures=9, options=("--restart",))
        text = " ".join(pod.command(Path("/x")))
        assert "launch --hosts 2 --devices-per-host 8 --mesh 4x4 --host-shape 4x2" in text
        assert "--failures 9 --events /x/events.jsonl --run-dir /x/run --collective-limit" in text
        assert " --restart -- " in text

    @more
    @pytest.mark.slow
    def test_one_process_for_comparison(self, tmp_path):
        alone = Pod(hosts=4, steps=6, failures=1).train_alone(tmp_path / "alone")
        argv = ["--emulate", "one", "--mesh", "4x4", "--failed", "2x2@0,0", "--steps", "6"]
        assert train.main([*argv, "--out", str(tmp_path)]) == 0
        assert 0 < difference(tmp_path / "weights.npz", alone) < TOLERANCE


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--faults", "burn@1"], "'burn@1' is not a fault"), (["--out", "."], "is not empty")],
)
def test_bad_arguments(argv, message, capsys):
    assert soak.main(argv) == 2
    assert message in capsys.readouterr().err


def trained(folder, *argv):
    argv = ["--emulate", "one", "--mesh", "2x2", "--steps", "4", "--out", str(folder), *argv]
    assert train.main(argv) == 0
    return folder


@pytest.fixture(scope="module", autouse=True)
def trainers_made_once():
    """Share trainers between runs with the same settings, to trace them once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.soak.train.soak_trainer", cache(train.soak_trainer))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
class TestTrainer:
    def test_every_point_is_used_once(self, whole):
        lines = [json.loads(line) for line in (whole / "used-1-0.jsonl").read_text().splitlines()]
        assert sorted(line["step"] for line in lines) == [1, 2, 3, 4]
        assert sorted(index for line in lines for index in line["examples"]) == [*range(4 * 48)]

    def test_on_fewer_chips_the_weights_are_close(self, whole, tmp_path):
        trained(tmp_path, "--failed", "1x2@0,0")
        with np.load(whole / "weights.npz") as one, np.load(tmp_path / "weights.npz") as other:
            assert sorted(one.files) == ["layer0.b", "layer0.w", "layer1.b", "layer1.w"]
            for name in one.files:
                np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-6)
            moved = train.first_params(train.PRESETS["tiny"], seed=0)["layer0"]["w"]
            assert np.abs(one["layer0.w"] - moved).max() > 0.01

    def test_it_resumes_from_a_checkpoint(self, whole, tmp_path, monkeypatch):
        saved = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "2")
        monkeypatch.setenv("FTMESH_RUN_DIR", str(tmp_path / "run"))
        trained(tmp_path, *saved)
        shutil.rmtree(tmp_path / "saved" / "4")
        monkeypatch.setenv("FTMESH_RUN_DIR", str(tmp_path / "again"))
        trained(tmp_path, *saved, "--resume")
        lines = (tmp_path / "again" / "used-1-0.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["step"] for line in lines) == [3, 4]
        with np.load(whole / "weights.npz") as one, np.load(tmp_path / "weights.npz") as other:
            for name in one.files:
                np.testing.assert_array_equal(other[name], one[name])
