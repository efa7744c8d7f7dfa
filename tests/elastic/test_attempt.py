"""Attempts in one process without a controller, and what they do with errors and signals."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import elastic
from ftmesh.checkpoint import Checkpoints
from ftmesh.checkpoint.restore import _processes_by_block, is_deleted, move_state
from ftmesh.distributed.consensus import AgreedSteps
from ftmesh.elastic.controller_client import GenerationChanged
from ftmesh.elastic.elastic_group import ElasticGroup, recover
from ftmesh.errors import ArgumentError, CheckpointError, ClusterError, TrainingError
from ftmesh.testing import cpu_grid
from tests.support.pods import process_groups, run_in_all


def test_once_with_all_devices():
    """Without a controller there is one attempt, a commit does nothing, and errors propagate."""
    count = 0
    for attempt in elastic.attempts():
        with attempt as run:
            count += 1
            mesh = run.mesh()
            assert set(mesh.devices.flat) == set(jax.devices())
            assert mesh.axis_names == ("data",)
            assert run.is_primary
            step, state = run.restore({"w": jnp.arange(3.0)})
            assert step == 0
            assert [run.commit(step + 1, state) for step in range(3)] == [False] * 3
            assert run.plan(executor="xla").jax_mesh("data").devices.size == mesh.size
    assert count == 1


def test_the_shape_of_the_mesh():
    attempt = next(elastic.attempts())
    mesh = attempt.mesh(("replica", "shard"), (-1, 4))
    assert dict(mesh.shape) == {"replica": jax.device_count() // 4, "shard": 4}
    with pytest.raises(ArgumentError, match=r"do not fill a mesh of shape \(-1, 7\)"):
        attempt.mesh(("replica", "shard"), (-1, 7))
    with pytest.raises(ArgumentError, match="do not fill"):
        attempt.mesh(("replica", "shard"))


def test_errors_of_the_loop_propagate():
    entered = []

    def train():
        for attempt in elastic.attempts():
            with attempt:
                entered.append(attempt)
                raise jax.errors.JaxRuntimeError("mine")

    with pytest.raises(jax.errors.JaxRuntimeError, match="mine"):
        train()
    assert len(entered) == 1


def test_a_break_ends_the_run():
    for attempt in elastic.attempts():
        with attempt:
            break
    assert attempt.is_done


def test_misuse():
    with pytest.raises(ArgumentError, match="copy_every is 0"):
        next(elastic.attempts(copy_every=0))
    with pytest.raises(ArgumentError, match="with attempt as run"):
        for _ in elastic.attempts():
            pass
    for attempt in elastic.attempts():
        with attempt as run:
            with pytest.raises(ArgumentError, match="call restore before commit"):
                run.commit(1, {})
            with pytest.raises(ArgumentError, match="give load="):
                run.restore({}, latest_step=3)
            run.restore({})
            run.commit(2, {})
            with pytest.raises(ArgumentError, match="step 2 is not after step 2"):
                run.commit(2, {})


class TestCheckpoints:
    """The same command continues from the newest checkpoint, of any kind."""

    def test_of_orbax(self, tmp_path):
        def train(num_steps):
            with ocp.CheckpointManager(tmp_path) as manager:
                for attempt in elastic.attempts():
                    with attempt as run:
                        sharding = NamedSharding(run.mesh(), P())
                        state = {"w": jax.device_put(jnp.zeros(3), sharding)}
                        first, state = run.restore(
                            state,
                            latest_step=manager.latest_step(),
                            load=lambda step, state=state: manager.restore(
                                step, args=ocp.args.StandardRestore(state)
                            ),
                        )
                        for step in range(first, num_steps):
                            state = {"w": state["w"] + 1}
                            run.commit(step + 1, state)
                        manager.save(num_steps, args=ocp.args.StandardSave(state))
            return first, state

        assert train(3)[0] == 0
        first, state = train(5)
        assert first == 3
        np.testing.assert_array_equal(state["w"], np.full(3, 5.0))

    def train(self, folder, steps):
        """Train from the newest checkpoint; write one at each of `steps`. Return the first step."""
        with Checkpoints(folder, resume=True, log=lambda line: None) as checkpoints:
            for attempt in elastic.attempts():
                with attempt as run:
                    types = {"w": jax.ShapeDtypeStruct((2,), np.float32), "epoch": 0}
                    first, state = run.restore(
                        types, init=lambda: {"w": jnp.zeros(2), "epoch": 0}, checkpoints=checkpoints
                    )
                    np.testing.assert_array_equal(state["w"], np.full(2, first))
                    assert state["epoch"] == first
                    for step in steps:
                        state = {"w": jnp.full(2, float(step)), "epoch": step}
                        run.commit(step, state)
                        run.save(checkpoints, step, state)
        return first

    def test_of_ftmesh(self, tmp_path):
        assert self.train(tmp_path, [2, 4]) == 0
        assert self.train(tmp_path, []) == 4

    def test_of_a_step_that_is_repeated(self, tmp_path):
        """It is complete already, and another generation writes the same."""
        self.train(tmp_path, [2])
        with Checkpoints(tmp_path, resume=True) as checkpoints:
            run = next(elastic.attempts())
            state = {"w": jnp.zeros(2), "epoch": 2}
            with pytest.raises(CheckpointError, match="exists already"):
                run.save(checkpoints, 2, state)
            run.group = ElasticGroup(controller=FakeController())
            assert run.group.generation == 2
            run.save(checkpoints, 2, state)
            run.save(checkpoints, 3, {"w": jnp.full(2, 3.0), "epoch": 3})
        assert self.train(tmp_path, []) == 3

    def test_a_damaged_one_is_skipped(self, tmp_path):
        """The step is that of the state."""
        self.train(tmp_path, [2, 4])
        file = tmp_path / "4" / "0.bin"
        file.write_bytes(b"x" * file.stat().st_size)
        assert self.train(tmp_path, []) == 2


class TestWrongResults:
    """A chip whose copy differs, in a run that nobody recovers."""

    def commit(self, step, wrong, **options):
        for attempt in elastic.attempts(topology=lambda group: cpu_grid("2x2"), check_every=2):
            with attempt as run:
                mesh = run.mesh()
                _, state = run.restore({"w": jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))})
                parts = [x.data + (x.device == wrong) for x in state["w"].addressable_shards]
                array = jax.make_array_from_single_device_arrays((3,), state["w"].sharding, parts)
                run.commit(step, {"w": array}, **options)

    def test_it_is_named(self):
        with pytest.raises(TrainingError, match=r"chips 1x1@1,0: .* after step 4; give --failed"):
            self.commit(4, cpu_grid("2x2").devices[1])
        with pytest.raises(TrainingError, match="give --failed 1x1@0,0"):
            self.commit(3, cpu_grid("2x2").devices[0], wait=True)

    def test_only_at_its_steps(self):
        self.commit(3, cpu_grid("2x2").devices[1])
        self.commit(4, None)


def test_sigterm_is_deferred():
    """One commit says to save, and the next exits."""
    before = signal.getsignal(signal.SIGTERM)
    answers = []

    def train():
        for attempt in elastic.attempts(defer_sigterm=True):
            with attempt as run:
                first, state = run.restore({"w": jnp.zeros(2)})
                for step in range(first, 9):
                    if step == 3:
                        os.kill(os.getpid(), signal.SIGTERM)
                    answers.append(run.commit(step + 1, state))

    with pytest.raises(SystemExit) as caught:
        train()
    assert answers == [False, False, False, True]
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_processes_choose_the_same_steps():
    """The slowest counts; intervals double at most, and values of all are returned."""

    def choose(group):
        steps = AgreedSteps(group, "test", 0, None)
        chosen = [steps.next_step]
        for _ in range(5):
            values = steps.choose_next(chosen[-1], 1000.0 * group.process, group.process)
            assert values == [0, 1, 2]
            chosen.append(steps.next_step)
        return chosen

    with process_groups(3) as groups:
        assert run_in_all(choose, groups) == [[1, 3, 7, 15, 31, 63]] * 3


def test_every_so_many_steps():
    steps = AgreedSteps(ElasticGroup(), "test", 7, 5)
    assert steps.next_step == 10
    assert steps.choose_next(12, 0.0, "own") == ["own"]
    assert steps.next_step == 15


CUT = P("x")


class FakeController:
    """Records what `recover` asks of it."""

    def __init__(self):
        self.calls, self.first_generation = [], 1
        self.membership = type("Membership", (), {"generation": 2, "members": (0,)})()

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name) or self.membership


def test_only_errors_that_others_caused_are_recovered_from():
    group = ElasticGroup(controller=FakeController())

    def calls(error, cause=None):
        group.controller.calls.clear()
        error.__cause__ = cause
        assert recover(group, error).members == (0,)
        return group.controller.calls[0]

    assert calls(GenerationChanged()) == "enter_next_generation"
    assert calls(ValueError(), GenerationChanged()) == "enter_next_generation"
    assert calls(jax.errors.JaxRuntimeError()) == "report_failure"
    assert calls(ValueError(), jax.errors.JaxRuntimeError()) == "report_failure"
    assert calls(ClusterError("none")) == "request_restart"
    with pytest.raises(ValueError, match="own"):
        recover(group, ValueError("own"))
    with pytest.raises(KeyboardInterrupt):
        recover(group, KeyboardInterrupt())


class TestHeldStates:
    """Which states survive, and how they move to other devices."""

    def state_on(self, devices, shape=(-1,), spec=CUT):
        mesh = Mesh(np.array(devices).reshape(shape), ("x", "y")[: len(shape)])
        put = lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec))  # noqa: E731
        return {
            "cut": put(jnp.arange(48.0).reshape(12, 4), spec),
            "whole": put(jnp.ones(3, jnp.bfloat16), P()),
            "key": put(jax.random.key(4), P()),
            "number": 7,
            "rate": 0.5,
            "host": np.arange(2),
        }

    def test_moves_to_fewer_devices(self):
        old = self.state_on(jax.devices()[:4])
        like = jax.tree.map(lambda x: x, self.state_on(jax.devices()[1:4]))
        new = move_state({**old, "number": 8}, None, like, None)
        assert (new["number"], new["rate"], type(new["number"])) == (8, 0.5, int)
        for name in ("cut", "whole", "key"):
            assert new[name].sharding == like[name].sharding
            both = (
                jax.device_get(x if name != "key" else jax.random.key_data(x))
                for x in (new[name], old[name])
            )
            np.testing.assert_array_equal(*both)
        np.testing.assert_array_equal(new["host"], [0, 1])

    def test_moves_from_healthy_devices(self):
        """The copy of a chip that is left out may be wrong; what it alone has is kept."""
        old = self.state_on(jax.devices()[:4], (2, 2), P("x"))
        unhealthy = jax.devices()[3]
        for name in ("cut", "whole"):
            parts = [x.data + (x.device == unhealthy) for x in old[name].addressable_shards]
            sharding = old[name].sharding
            old[name] = jax.make_array_from_single_device_arrays(
                old[name].shape, sharding, [part.astype(old[name].dtype) for part in parts]
            )
        new = move_state(old, None, self.state_on(jax.devices()[:3]), None)
        np.testing.assert_array_equal(new["cut"], np.arange(48.0).reshape(12, 4))
        np.testing.assert_array_equal(new["whole"], np.ones(3))
        alone = self.state_on(jax.devices()[:4])
        new = move_state(alone, None, self.state_on(jax.devices()[:3]), None)
        np.testing.assert_array_equal(new["cut"], np.arange(48.0).reshape(12, 4))

    def test_donated_states_are_noticed(self):
        state = self.state_on(jax.devices()[:2])
        assert not is_deleted(state)
        state["cut"].delete()
        assert is_deleted(state)

    @pytest.mark.parametrize(
        ("shape", "spec", "processes", "expected"),
        [
            ((4,), P(), {0}, (True, True)),
            ((4,), P("x"), {0, 1, 2, 3}, (False, True)),
            ((4,), P("x"), {0, 1, 2}, (False, False)),
            ((2, 2), P("x"), {0, 2}, (False, True)),  # a replica of each block
            ((2, 2), P("y"), {0, 1, 2}, (False, True)),
            ((2, 2), P("y"), {0, 2}, (False, False)),
        ],
    )
    def test_survivors(self, monkeypatch, shape, spec, processes, expected):
        numbers = {device: number for number, device in enumerate(jax.devices())}
        monkeypatch.setattr("ftmesh.checkpoint.restore.process_of", numbers.get)
        array = self.state_on(jax.devices()[:4], shape, spec)["cut"]
        holding = [set(own) for own, _ in _processes_by_block(array, {})]
        each = all(processes <= own for own in holding)
        assert (each, all(processes & own for own in holding)) == expected

    def test_survivors_on_healthy_devices(self, monkeypatch):
        """Two hosts of two chips each have the state; one chip of the first is unhealthy."""
        numbers = {device: number // 2 for number, device in enumerate(jax.devices())}
        monkeypatch.setattr("ftmesh.checkpoint.restore.process_of", numbers.get)
        devices = jax.devices()[:4]
        cut = self.state_on(devices, (2, 2), P("y"))["cut"]
        blocks = list(_processes_by_block(cut, {}, set(devices[1:])))
        assert [holding for holding, _ in blocks] == [{1}, {0, 1}]
        partners = {devices[1]: devices[0], devices[3]: devices[2]}
        blocks = _processes_by_block(cut, partners, set(devices[1:]))
        assert [both for _, both in blocks] == [{1}, {0, 1}]

    def test_survivors_with_copies(self, monkeypatch):
        """Each host has copies of the next one's shards."""
        numbers = {device: number for number, device in enumerate(jax.devices())}
        monkeypatch.setattr("ftmesh.checkpoint.restore.process_of", numbers.get)
        devices = jax.devices()[:4]
        partners = {device: devices[number - 1] for number, device in enumerate(devices)}
        blocks = _processes_by_block(self.state_on(devices)["cut"], partners)
        assert sorted(map(sorted, (both for _, both in blocks))) == [[0, 1], [0, 3], [1, 2], [2, 3]]
