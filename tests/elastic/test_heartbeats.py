"""Watching: how long each phase may take, and who is to blame when nothing goes on."""

import math

import pytest

from ftmesh.elastic.heartbeats import (
    PHASES,
    RECENT,
    SILENCE,
    SLACK,
    TIMES,
    WAITING,
    Deadlines,
    Seen,
    parse_limits,
)
from ftmesh.errors import ArgumentError

LIMIT = 5.0


def deadlines(**given):
    """As after some steps of 0.1 seconds, with limits for a save and for the end of an epoch."""
    found = Deadlines(LIMIT, {"save": 15.0, "over": 6.0, **given})
    for _ in range(3):
        found.took("step", 0.1)
    return found


def seen(text):
    """Processes as ``step 3 9, save 70``: what each does, for how long, and of which step."""
    words = [[*each.split(), "0"][:3] for each in text.split(",")]
    return {
        number: Seen(phase, float(seconds), int(step))
        for number, (phase, seconds, step) in enumerate(words)
    }


class TestDeadlines:
    @pytest.mark.parametrize("phase", PHASES)
    def test_what_was_never_seen_has_a_limit_of_its_own(self, phase):
        assert Deadlines(LIMIT).of(phase) == SLACK + PHASES[phase]
        assert Deadlines(LIMIT, {phase: 7.0}).of(phase) == SLACK + 7

    @pytest.mark.parametrize("phase", WAITING)
    def test_who_waits_may_wait_for_ever(self, phase):
        assert Deadlines(LIMIT).of(phase) == math.inf

    def test_what_nobody_has_heard_of(self):
        assert Deadlines(LIMIT).of("dance") == SLACK + LIMIT

    def test_what_is_given_counts_however_long_it_took(self):
        found = deadlines(save=7.0)
        found.took("save", 4.0)
        assert found.of("save") == SLACK + 7

    def test_several_times_as_long_as_it_took_where_nothing_is_given(self):
        found = Deadlines(LIMIT)
        for seconds in (PHASES["save"], 1.0):
            found.took("save", seconds)
        assert found.of("save") == SLACK + LIMIT + TIMES * PHASES["save"]

    def test_but_no_less_than_at_first(self):
        """A state of nothing is restored at once; the next one may be large."""
        found = Deadlines(LIMIT)
        found.took("restore", 0.1)
        assert found.of("restore") == SLACK + PHASES["restore"]

    def test_the_usual_step(self):
        found = deadlines(step=70.0)
        found.took("step", 9.0)
        assert found.usual_step == 0.1
        assert found.of("step") == SLACK + LIMIT + TIMES * 0.1

    def test_what_goes_by_the_steps(self):
        assert deadlines().of("read") == deadlines().of("step")
        assert deadlines(read=600.0).of("read") == SLACK + 600

    def test_what_is_long_ago_counts_no_more(self):
        found = Deadlines(LIMIT)
        for seconds in (100.0, 60.0):
            for _ in range(RECENT):
                found.took("step", 2.0)
                found.took("save", seconds)
        assert found.usual_step == 2.0
        assert found.of("save") == SLACK + LIMIT + TIMES * 60

    def test_silence_is_longer_than_a_collective(self):
        assert Deadlines(30.0).silence == SILENCE + 60

    def test_no_step_yet(self):
        assert Deadlines(LIMIT).usual_step == 0


# The deadline of a step, and of reading, is 7 seconds; of a save 16; of a start 301.
@pytest.mark.parametrize(
    ("doing", "stuck"),
    [
        # Progress, or time left.
        ("step 1, step 1, step 1", []),
        ("step 6.9, step 6.9, read 6.9", []),
        ("save 15, step 6, commit 20", []),
        ("start 300, agree 300", []),
        # One that is late, and those that wait for it.
        ("step 8, step 8, read 8", [2]),
        ("commit 8, commit 8, read 8", [2]),
        ("step 8, step 8, save 17", [2]),
        ("agree 400, agree 400, start 302", [2]),
        ("commit 500, commit 500, over 8", [2]),
        ("step 8, commit 8, commit 8", [0]),
        # In a step all wait for all: nobody but all of them.
        ("step 8, step 8, step 8", [0, 1, 2]),
        ("step 8, step 6, step 8", [0, 2]),
        # One is on its way to the step, and has its own deadline.
        ("step 8, step 8, read 6", []),
        ("step 8, step 8, save 15", []),
        ("step 8, step 8, compile 90", []),
        # Several that are late.
        ("read 8, read 8, commit 1", [0, 1]),
        ("read 8, save 17, step 99", [0, 1]),
        # All wait, for ever; that is not for this to see.
        ("commit 999, commit 999, agree 999", []),
        # A collective of a step has failed: whoever has not come to it has had its time.
        ("failed 2 9, failed 2 9, read 6.5 9", [2]),
        ("failed 2 9, failed 2 9, save 6.5 8", [2]),
        ("failed 2 9, failed 2 9, save 5.5 8", []),
        ("failed 0.5 9, failed 0.5 9, save 6.5 8", []),
        ("failed 2 9, step 6.5 9, save 6.5 8", [2]),
        # Whoever is in it may have been failed by the one that says so.
        ("failed 2 9, commit 2 8, step 6.5 9", []),
        ("failed 2 9, commit 2 8, step 8 9", [2]),
        ("failed 2 9, evaluate 35 9, evaluate 35 9", []),
        ("failed 2, compile 40, compile 40", []),
        ("failed 2, commit 99, agree 99", []),
        ("failed 999, failed 999, failed 999", []),
    ],
)
def test_who_is_stuck(doing, stuck):
    assert sorted(deadlines().stuck(seen(doing))) == stuck


@pytest.mark.parametrize("phase", WAITING)
@pytest.mark.parametrize("other", [*WAITING, *PHASES])
def test_one_that_waits_is_never_to_blame(phase, other):
    assert 0 not in deadlines().stuck({0: Seen(phase, 1e9), 1: Seen(other, 1e9)})


def test_nobody_is_stuck_where_there_is_nobody():
    assert deadlines().stuck({}) == set()


class TestLimits:
    def test_as_they_are_written(self):
        assert parse_limits("") == {}
        assert parse_limits("compile=60, save=0.5,") == {"compile": 60.0, "save": 0.5}

    @pytest.mark.parametrize(
        "text", ["compile", "compile=", "compile=soon", "compile=0", "save=-1", "save=nan", "x=1"]
    )
    def test_what_is_none(self, text):
        with pytest.raises(ArgumentError, match=f"'{text}' is no limit: give a phase of start"):
            parse_limits(text)

    @pytest.mark.parametrize("phase", WAITING)
    def test_who_waits_has_none(self, phase):
        with pytest.raises(ArgumentError, match="is no limit"):
            parse_limits(f"{phase}=9")
