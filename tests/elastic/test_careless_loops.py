"""Loops that hand over what other loops do not: NumPy arrays, and integers of other types."""

import numpy as np
import pytest

from ftmesh import elastic
from ftmesh.elastic import elastic_group
from ftmesh.elastic.step_commit import HeldStep
from ftmesh.errors import ClusterError


def test_a_held_state_does_not_change_with_the_arrays_of_the_loop():
    """A state that is continued from would be some steps ahead in these."""
    state = {"seen": np.zeros(2), "row": np.float32(1), "count": 3}
    held = HeldStep.create(1, state, None, None)
    state["seen"] += 1
    assert held.state["seen"].tolist() == [0, 0]
    assert (type(held.state["row"]), type(held.state["count"])) == (np.float32, int)


def test_any_integer_is_a_step():
    """It is sent as JSON where there is a controller, so the same must hold without one."""
    for attempt in elastic.attempts():
        with attempt as run:
            run.restore({}, latest_step=np.int64(0), load=lambda step: {})
            for step in np.arange(3):
                run.commit(step + 1, {})
            assert repr(run._commits._last_step) == "3"
            with pytest.raises(TypeError, match="integer"):
                run.commit(4.0, {})


def test_jax_that_is_initialized_under_a_controller(monkeypatch):
    """Nobody would notice losses, and the controller would wait for the process."""
    monkeypatch.setattr(elastic_group._compat, "coordination_client", lambda: object())
    monkeypatch.setenv("FTMESH_STEWARD", "127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"remove jax\.distributed\.initialize\(\)"):
        next(elastic.attempts())
