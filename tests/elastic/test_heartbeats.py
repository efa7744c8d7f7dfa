"""How long each phase may take, and who is to blame when there is no progress."""

import math

import pytest

from ftmesh.elastic.heartbeats import (
    PHASE_TIMEOUTS,
    SILENCE_SECONDS,
    SLACK_SECONDS,
    SLOWDOWN,
    STEPS_REMEMBERED,
    WAITING_PHASES,
    Activity,
    ProgressMonitor,
    parse_phase_timeouts,
)
from ftmesh.errors import ArgumentError

TIMEOUT = 5.0


def monitor(**given):
    """A monitor after some steps of 0.1 seconds, with timeouts for "save" and "over"."""
    result = ProgressMonitor(TIMEOUT, {"save": 15.0, "over": 6.0, **given})
    for _ in range(3):
        result.record("step", 0.1)
    return result


def activities(text):
    """Parse ``step 3 9, save 70``: what each worker does, for how long, and in which step."""
    words = [[*part.split(), "0"][:3] for part in text.split(",")]
    return {
        number: Activity(phase, float(seconds), int(step))
        for number, (phase, seconds, step) in enumerate(words)
    }


class TestTimeouts:
    @pytest.mark.parametrize("phase", PHASE_TIMEOUTS)
    def test_the_timeout_of_a_phase_that_was_never_seen(self, phase):
        assert ProgressMonitor(TIMEOUT).timeout(phase) == SLACK_SECONDS + PHASE_TIMEOUTS[phase]
        assert ProgressMonitor(TIMEOUT, {phase: 7.0}).timeout(phase) == SLACK_SECONDS + 7

    @pytest.mark.parametrize("phase", WAITING_PHASES)
    def test_waiting_has_no_timeout(self, phase):
        assert ProgressMonitor(TIMEOUT).timeout(phase) == math.inf

    def test_an_unknown_phase(self):
        assert ProgressMonitor(TIMEOUT).timeout("dance") == SLACK_SECONDS + TIMEOUT

    def test_a_given_timeout_is_not_learned(self):
        after = monitor(save=7.0)
        after.record("save", 4.0)
        assert after.timeout("save") == SLACK_SECONDS + 7

    def test_ten_times_the_longest(self):
        after = ProgressMonitor(TIMEOUT)
        for seconds in (PHASE_TIMEOUTS["save"], 1.0):
            after.record("save", seconds)
        assert after.timeout("save") == SLACK_SECONDS + TIMEOUT + SLOWDOWN * PHASE_TIMEOUTS["save"]

    def test_but_no_less_than_the_first_timeout(self):
        """An empty state is restored at once; the next one may be large."""
        after = ProgressMonitor(TIMEOUT)
        after.record("restore", 0.1)
        assert after.timeout("restore") == SLACK_SECONDS + PHASE_TIMEOUTS["restore"]

    def test_the_typical_step(self):
        after = monitor(step=70.0)
        after.record("step", 9.0)
        assert after.typical_step == 0.1
        assert after.timeout("step") == SLACK_SECONDS + TIMEOUT + SLOWDOWN * 0.1

    def test_reading_goes_by_the_steps(self):
        assert monitor().timeout("read") == monitor().timeout("step")
        assert monitor(read=600.0).timeout("read") == SLACK_SECONDS + 600

    def test_old_durations_are_forgotten(self):
        after = ProgressMonitor(TIMEOUT)
        for seconds in (100.0, 60.0):
            for _ in range(STEPS_REMEMBERED):
                after.record("step", 2.0)
                after.record("save", seconds)
        assert after.typical_step == 2.0
        assert after.timeout("save") == SLACK_SECONDS + TIMEOUT + SLOWDOWN * 60

    def test_the_silence_timeout_is_longer_than_a_collective(self):
        assert ProgressMonitor(30.0).silence_timeout == SILENCE_SECONDS + 60

    def test_no_step_yet(self):
        assert ProgressMonitor(TIMEOUT).typical_step == 0


# The timeout of "step" and "read" is 7 seconds; of "save" 16; of "start" 301.
@pytest.mark.parametrize(
    ("doing", "stuck"),
    [
        # Progress, or time left.
        ("step 1, step 1, step 1", []),
        ("step 6.9, step 6.9, read 6.9", []),
        ("save 15, step 6, commit 20", []),
        ("start 300, agree 300", []),
        # One is late, and the others wait for it.
        ("step 8, step 8, read 8", [2]),
        ("commit 8, commit 8, read 8", [2]),
        ("step 8, step 8, save 17", [2]),
        ("agree 400, agree 400, start 302", [2]),
        ("commit 500, commit 500, over 8", [2]),
        ("step 8, commit 8, commit 8", [0]),
        # In a step all wait for all: all of them are stuck.
        ("step 8, step 8, step 8", [0, 1, 2]),
        ("step 8, step 6, step 8", [0, 2]),
        # One is on its way to the step, and has its own timeout.
        ("step 8, step 8, read 6", []),
        ("step 8, step 8, save 15", []),
        ("step 8, step 8, compile 90", []),
        # Several are late.
        ("read 8, read 8, commit 1", [0, 1]),
        ("read 8, save 17, step 99", [0, 1]),
        # All wait: the controller handles that.
        ("commit 999, commit 999, agree 999", []),
        # A collective of a step has failed: a worker that has not reached the step is late.
        ("failed 2 9, failed 2 9, read 6.5 9", [2]),
        ("failed 2 9, failed 2 9, save 6.5 8", [2]),
        ("failed 2 9, failed 2 9, save 5.5 8", []),
        ("failed 0.5 9, failed 0.5 9, save 6.5 8", []),
        ("failed 2 9, step 6.5 9, save 6.5 8", [2]),
        # A worker in that step may have been failed by the one that reports it.
        ("failed 2 9, commit 2 8, step 6.5 9", []),
        ("failed 2 9, commit 2 8, step 8 9", [2]),
        ("failed 2 9, evaluate 35 9, evaluate 35 9", []),
        ("failed 2, compile 40, compile 40", []),
        ("failed 2, commit 99, agree 99", []),
        ("failed 999, failed 999, failed 999", []),
    ],
)
def test_who_is_stuck(doing, stuck):
    assert sorted(monitor().find_stuck(activities(doing))) == stuck


@pytest.mark.parametrize("phase", WAITING_PHASES)
@pytest.mark.parametrize("other", [*WAITING_PHASES, *PHASE_TIMEOUTS])
def test_a_waiting_worker_is_never_to_blame(phase, other):
    assert 0 not in monitor().find_stuck({0: Activity(phase, 1e9), 1: Activity(other, 1e9)})


def test_no_workers():
    assert monitor().find_stuck({}) == set()


class TestParsing:
    def test_valid_timeouts(self):
        assert parse_phase_timeouts("") == {}
        assert parse_phase_timeouts("compile=60, save=0.5,") == {"compile": 60.0, "save": 0.5}

    @pytest.mark.parametrize(
        "text", ["compile", "compile=", "compile=soon", "compile=0", "save=-1", "save=nan", "x=1"]
    )
    def test_invalid_timeouts(self, text):
        with pytest.raises(
            ArgumentError, match=f"'{text}' is not a timeout: give a phase of start"
        ):
            parse_phase_timeouts(text)

    @pytest.mark.parametrize("phase", WAITING_PHASES)
    def test_waiting_phases_have_none(self, phase):
        with pytest.raises(ArgumentError, match="is not a timeout"):
            parse_phase_timeouts(f"{phase}=9")
