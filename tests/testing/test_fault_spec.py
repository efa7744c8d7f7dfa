"""The text form of faults, and random faults."""

import pytest

from ftmesh.errors import ArgumentError
from ftmesh.testing.fault_spec import (
    ANY_PROCESS,
    KINDS,
    STEPLESS_MOMENTS,
    Fault,
    draw_faults,
    draw_timed_faults,
    parse_faults,
)


def test_the_short_form():
    assert parse_faults("kill@2:30") == [Fault(kind="kill", process=2, step=30, moment="step")]
    assert parse_faults("stop@0:12:collective; raise@1:0:start;") == [
        Fault(kind="stop", process=0, step=12, moment="collective"),
        Fault(kind="raise", process=1, moment="start"),
    ]
    assert parse_faults("") == []


def test_seconds_and_steps():
    (fault,) = parse_faults("slow@1:30,0.25,20")
    assert (fault.seconds, fault.num_steps, fault.moment) == (0.25, 20, "step")


def test_by_time_in_any_process():
    (fault,) = parse_faults("kill@*:t=120.5:commit")
    assert (fault.process, fault.after, fault.step, fault.moment) == (
        ANY_PROCESS,
        120.5,
        0,
        "commit",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_text_form_round_trips(kind):
    for moment in KINDS[kind]:
        for when in ({"step": 3}, {"after": 2.5}):
            fault = Fault(kind=kind, process=1, moment=moment, **when)
            assert parse_faults(str(fault)) == [fault]


NINES = "9" * 5000


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@2", "kill@-1:3", "kill@1:3:", "random:x", "a b", "kill@٢:3", "random:٧",
     f"kill@{NINES}:3", f"kill@1:{NINES}", f"slow@1:3,{NINES}", f"random:{NINES}",
     f"random:7:{NINES}"],
)  # fmt: skip
def test_malformed_text_is_rejected_with_the_right_form(text):
    with pytest.raises(ArgumentError, match=r"KIND@PROCESS:STEP\[:MOMENT\].*kill@2:30"):
        parse_faults(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("burn@1:3", "unknown fault burn: give one of kill, stop"),
        ("kill@1:3:lunch", "cannot happen at the moment 'lunch': give start or compile"),
        ("stuck@1:3:collective", "cannot happen at the moment 'collective'"),
        ("torn@1:3:step", "cannot happen at the moment 'step': give checkpoint"),
    ],
)
def test_unknown_kinds_and_moments_are_rejected(text, message):
    with pytest.raises(ArgumentError, match=message):
        parse_faults(text)


class TestRandomFaults:
    def test_one_to_three_within_hosts_and_steps(self):
        drawn = [draw_faults(seed, hosts=4, steps=30) for seed in range(300)]
        assert {len(faults) for faults in drawn} == {1, 2, 3}
        faults = [fault for draw in drawn for fault in draw]
        assert {fault.process for fault in faults} == {0, 1, 2, 3}
        assert {fault.kind for fault in faults} == {*KINDS}
        assert max(fault.step for fault in faults) == 30
        assert all((fault.step == 0) == (fault.moment in STEPLESS_MOMENTS) for fault in faults)
        assert all(faults[0].moment != "recovery" for faults in drawn)

    def test_same_seed_draws_the_same_faults(self):
        assert (
            parse_faults("random:7:2", hosts=4)
            == draw_faults(7, 2, hosts=4)
            == parse_faults("random:7:2", hosts=4)
        )
        assert len(draw_faults(7, 2, hosts=4)) == 2
        assert draw_faults(7, 2, hosts=4) != draw_faults(8, 2, hosts=4)

    def test_by_time(self):
        faults = draw_timed_faults(0, 120, 600)
        assert [fault.after for fault in faults] == [120, 240, 360, 480, 600]
        assert {fault.process for fault in faults} == {ANY_PROCESS}
