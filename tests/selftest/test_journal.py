"""The journal of a self-test, and what processes conclude from theirs."""

from ftmesh.selftest.journal import (
    DIED,
    FAILED,
    HUNG,
    LEFT_OUT,
    PASSED,
    CheckResult,
    Journal,
    Problem,
    final_results,
    history,
    merge_histories,
    merge_results,
)


def begin(name):
    return {"event": "begin", "check": name, "limit": 60}


def ended(name, how, text="", seconds=60.0):
    return {"event": "ended", "check": name, "how": how, "text": text, "seconds": seconds}


def result(name, **values):
    return {"event": "result", "result": CheckResult(name, **values).to_json()}


def test_a_line_that_was_cut_short_is_skipped(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.read() == []
    journal.append("begin", check="hops", limit=1)
    with open(journal.path, "ab") as file:
        file.write(b'{"event": "do')
    journal.append("ended", check="hops", how=DIED)
    assert [event["event"] for event in journal.read()] == ["begin", "ended"]


def test_results_survive_the_journal(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    given = CheckResult("hops", FAILED, (Problem("x wraps", "--wrap x"),), ("a",), {"n": 1}, 2.5)
    journal.append("result", result=given.to_json())
    (event,) = journal.read()
    assert CheckResult.from_json(event["result"]) == given


def test_what_some_processes_have_found():
    merged = merge_results(
        {
            0: CheckResult("right", notes=("ok",), data={"n": 1}, seconds=1),
            1: CheckResult("right", FAILED, (Problem("rank 5 is wrong"),), seconds=2),
            2: CheckResult("right", FAILED, (Problem("rank 5 is wrong"),)),
        }
    )
    assert merged.status == FAILED
    assert [problem.text for problem in merged.problems] == ["processes 1 and 2: rank 5 is wrong"]
    assert (merged.data, merged.seconds) == ({"n": 1}, 2)
    same = CheckResult("speed", FAILED, (Problem("slow"),))
    assert merge_results({0: same, 1: same}).problems == (Problem("slow"),)


def test_the_one_that_died_is_named_and_not_those_that_waited():
    failed = CheckResult("speed", FAILED, (Problem("connection reset"),)).to_json()
    merged = merge_histories(
        {
            0: history([begin("speed"), {"event": "done", "result": failed}]),
            1: history([begin("speed"), ended("speed", HUNG)]),
            2: history([begin("speed"), ended("speed", DIED, "it was killed by SIGKILL", 5.0)]),
            3: history([begin("speed"), ended("speed", DIED, "the service is gone", 5.5)]),
        }
    )["speed"]
    assert merged.status == DIED
    (problem,) = merged.problems
    assert problem.text == "process 2 died while it ran this check: it was killed by SIGKILL"
    assert merged.notes == (
        "process 1 waited for it and had to be killed", "process 3 died after that",
    )  # fmt: skip


def test_the_first_that_hung_is_the_cause_and_not_what_died_then():
    merged = merge_histories(
        {
            0: history([begin("hops"), ended("hops", HUNG, seconds=60.0)]),
            1: history([begin("hops"), ended("hops", DIED, "the service is gone", 59.9)]),
        }
    )["hops"]
    assert merged.status == HUNG
    assert merged.notes == ("process 1 died after that",)


def test_all_that_hung_are_named():
    own = history([begin("right: ppermute tree"), ended("right: ppermute tree", HUNG)])
    merged = merge_histories({0: own, 1: own})["right: ppermute tree"]
    assert merged.status == HUNG
    text = "it did not end within 60 s and was killed, in processes 0 and 1"
    assert [problem.text for problem in merged.problems] == [text]
    assert "do not plan with executor='ppermute' and 'tree'" in merged.problems[0].advice


def test_a_result_that_one_process_knows_is_everyones():
    merged = merge_histories(
        {0: history([begin("hops")]), 1: history([begin("hops"), result("hops")])}
    )
    assert merged["hops"].status == PASSED


def test_a_check_in_which_the_processes_part_is_tried_twice():
    once, twice = history([begin("hops")]), history([begin("hops"), begin("hops")])
    assert merge_histories({0: once, 1: once}) == {}
    assert merge_histories({0: twice, 1: once})["hops"].status == FAILED


def test_what_never_ran_is_left_out():
    events = [{"event": "checks", "names": ["topology", "hops", "speed"]}, result("topology")]
    results = final_results([*events, ended("hops", LEFT_OUT)], "process 2 did not connect")
    assert [(one.name, one.status, one.notes) for one in results] == [
        ("topology", PASSED, ()),
        ("hops", LEFT_OUT, ("no time left",)),
        ("speed", LEFT_OUT, ("process 2 did not connect",)),
    ]
