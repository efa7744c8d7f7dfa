"""The page in a real browser: clicked, played, and counted by itself."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ftmesh.algorithms import registry
from ftmesh.cost.lower_bounds import limits
from ftmesh.topology.notation import format_failed
from ftmesh.topology.topology import Topology
from ftmesh.view.page import build_scene, build_schedule_scene, pack, render_page
from ftmesh.view.server import Server
from tests.support import browser as chromium
from tests.support.more import more

pytestmark = pytest.mark.skipif(
    chromium.find_browser() is None,
    reason=f"no browser is installed: none of {', '.join(chromium.NAMES)} (Debian: chromium)",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    result = chromium.Browser(tmp_path_factory.mktemp("browser"))
    yield result
    result.close()


@pytest.fixture(autouse=True)
def no_errors(browser):
    browser.errors.clear()
    yield
    assert browser.errors == []
    assert browser.state()["errors"] == 0


@contextmanager
def served(topology, **options):
    server = Server(build_scene(topology, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server.close()
        thread.join()


@pytest.fixture
def opened(browser, tmp_path):
    def show(*scenes):
        path = tmp_path / "view.html"
        path.write_text(render_page(scenes), encoding="utf-8")
        browser.open(path.as_uri())

    return show


def change(browser, selector, value):
    browser.evaluate(
        f"(node => {{ node.value = {value!r}; node.dispatchEvent(new Event('input'));"
        " node.dispatchEvent(new Event('change')); })"
        f"(document.querySelector({selector!r}))"
    )


def play(browser, speed=500):
    change(browser, "#speed", speed)
    browser.click_on("#play")
    browser.wait("ftmesh.state().round === ftmesh.state().rounds")


def settled(browser, mesh):
    browser.wait(f"ftmesh.state().mesh === {mesh!r} && !ftmesh.state().is_asking")


def test_a_failed_chip_is_planned_for_and_played_to_the_end(browser):
    with served(Topology.grid("8x8")) as address:
        browser.open(address)
        assert browser.state()["algorithm"] == "two_dim"
        browser.click_chip(2, 4)
        settled(browser, "8x8 less 1x1@2,4")
        found = browser.state()
        result = build_scene(Topology.grid("8x8", failed="1x1@2,4"))
        assert found["algorithm"] == result["auto"]
        written = next(one["schedule"] for one in result["algorithms"] if "schedule" in one)
        assert found["cells"] == 63 * written["num_chunks"]
        assert found["busiest_share"] == pytest.approx(written["busiest_share"])
        assert found["complete"] == 0
        play(browser)
        assert browser.state()["complete"] == found["cells"]
        assert browser.text("#verdict") == (
            "Complete: all 63 live chips hold the full sum of every chunk."
        )
        assert "Complete: all 63" in browser.evaluate(
            "document.querySelector('#status').textContent"
        )


def test_clicking_fails_and_restores_links(browser):
    with served(Topology.grid("4x4"), payload_bytes=10_000) as address:
        browser.open(address)
        browser.click_link((1, 1), (2, 1))
        settled(browser, "4x4 less links 1,1-2,1")
        assert browser.evaluate("document.querySelector('#in-links').value") == "1,1-2,1"
        browser.click_link((2, 1), (1, 1))
        settled(browser, "4x4")


def test_the_last_of_several_clicks_counts(browser):
    with served(Topology.grid("5x5"), payload_bytes=10_000) as address:
        browser.open(address)
        for chip in ((1, 1), (2, 3), (1, 1), (4, 4)):
            browser.click_chip(*chip)
        settled(browser, "5x5 less 1x1@2,3;1x1@4,4")
        browser.click_chip(4, 4)
        browser.click_chip(2, 3)
        browser.click_chip(2, 3)
        settled(browser, "5x5 less 1x1@2,3")
        assert not browser.state()["is_draft"]


def test_plan_errors_are_shown_and_keep_the_plan(browser):
    with served(Topology.grid("4x4"), payload_bytes=10_000) as address:
        browser.open(address)
        change(browser, "#in-failed", "1x4@1,0")
        browser.click_on("#damage button")
        browser.wait("!document.querySelector('#notice').hidden && !ftmesh.state().is_asking")
        assert browser.text("#notice-text").startswith(
            "4x4 less 1x4@1,0 is cut into 2 parts that no link joins"
        )
        browser.click_on("#back")
        browser.wait("document.querySelector('#notice').hidden")
        assert browser.state()["mesh"] == "4x4"
        (noted,) = browser.errors  # the browser's own note of the refused request
        assert "status of 400" in noted["text"]
        browser.errors.clear()


def test_selecting_an_algorithm_and_a_payload(browser):
    with served(Topology.grid("4x4")) as address:
        browser.open(address)
        browser.click_on("input[value=tree]")
        browser.wait("ftmesh.state().algorithm === 'tree'")
        rounds = browser.state()["rounds"]
        change(browser, "#payload", 3)
        browser.wait(f"ftmesh.state().rounds < {rounds}")  # cut into fewer chunks
        result = build_scene(Topology.grid("4x4"), "tree", payload_bytes=22_494)
        assert browser.text("#payload-text") == "22.5 kB"
        (tree,) = (one for one in result["algorithms"] if one["algorithm"] == "tree")
        assert browser.state()["rounds"] == tree["rounds"]
        play(browser)
        assert browser.text("#verdict").startswith("Complete")


def test_a_file_shows_the_command_for_other_plans(browser, opened):
    opened(build_scene(Topology.grid("8x8", failed="2x2@2,2")))
    chips = {(2, 2), (3, 2), (2, 3), (3, 3)}
    for chip in ((7, 7), (4, 2), (4, 3)):
        browser.click_chip(*chip)
        chips.add(chip)
    blocks = format_failed(chips)
    assert browser.evaluate("document.querySelector('#in-failed').value") == blocks
    assert browser.text("#command") == f"ftmesh view 8x8 --failed '{blocks}' --out view.html"
    assert browser.state()["is_draft"]
    browser.click_on("#play")
    assert browser.state()["round"] == 0
    browser.click_on("#back")
    browser.wait("!ftmesh.state().is_draft")


def test_a_file_shows_its_other_plans(browser, opened):
    grid = Topology.grid("4x4")
    opened(build_scene(grid), build_scene(grid.with_failed([(1, 1)])))
    browser.click_chip(1, 1)
    settled(browser, "4x4 less 1x1@1,1")
    play(browser)
    assert browser.text("#verdict").startswith("Complete: all 15 live chips")
    browser.click_chip(1, 1)
    settled(browser, "4x4")


def test_a_custom_schedule_is_played(browser, opened):
    schedule = registry.build_schedule(Topology.grid("4x4"), "ring")
    opened(build_schedule_scene(replace(schedule, algorithm="mine")))
    assert (
        browser.evaluate("document.querySelector('input[name=algorithm]:checked').value") == "mine"
    )
    play(browser)
    assert browser.text("#verdict").startswith("Complete")
    browser.click_on("input[value=auto]")
    assert browser.text("#command").startswith("ftmesh view 4x4 --failed ''")
    change(browser, "#payload", 3)
    browser.click_on("#back")


@pytest.mark.parametrize(
    "topology",
    [
        Topology.grid("3x3x3", failed="1x1x1@1,1,1", wrap=[True, False, True]),
        Topology.grid("4x4", wrap=True),
        Topology.grid("6"),
    ],
    ids=str,
)
def test_layers_wrap_links_and_lines_are_played(browser, opened, topology):
    result = build_scene(topology, payload_bytes=100_000)
    result["mesh"]["devices_per_chip"] = 2
    opened(result)
    assert "Two devices" in browser.text("#devices")
    play(browser)
    found = browser.state()
    assert found["complete"] == found["cells"] > 0
    a, b = topology.links[-1]
    browser.click_link(a, b)
    failed = browser.evaluate("document.querySelector('#in-links').value")
    ends = sorted(",".join(map(str, end)) for end in (a, b))
    assert sorted(failed.split("-")) == ends


def three_in_a_line(*moves):
    """A scene of three chips that do these moves, (source, destination, op), a round each."""
    result = build_scene(Topology.grid("3"), "chain")
    (line,) = (one for one in result["algorithms"] if "schedule" in one)
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1)]
    phase = {
        "name": "planted",
        "rounds": len(moves),
        "starts": pack(range(len(moves) + 1)),
        "pair": pack([pairs.index((src, dst)) for src, dst, _ in moves]),
        "chunk": pack([0] * len(moves)),
        "count": pack([1] * len(moves)),
        "op": pack([op for _, _, op in moves]),
    }
    line["phase_us"] = [ends[-1:] for ends in line["phase_us"]]
    line["schedule"] |= {
        "num_chunks": 1,
        "src": pack([src for src, _ in pairs]),
        "dst": pack([dst for _, dst in pairs]),
        "route": pack([end for pair in pairs for end in pair]),
        "hops": pack([1] * 4),
        "phases": [phase],
    }
    return result


WHOLE = [(0, 1, 0), (2, 1, 0), (1, 0, 1), (1, 2, 1)]


@pytest.mark.parametrize(
    ("moves", "complete"),
    [
        (WHOLE, 3),
        ([(0, 1, 0), (0, 1, 0), (1, 0, 1), (1, 2, 1)], 0),  # one twice, one never: three in all
        ([(0, 1, 0), (2, 1, 0), (1, 0, 0), (1, 2, 1)], 2),  # added where it should be copied
        (WHOLE[:3], 2),
        ([(0, 1, 1), *WHOLE[1:]], 0),  # copied where it should be added
    ],
)
def test_the_page_counts_sums_itself(browser, opened, moves, complete):
    opened(three_in_a_line(*moves))
    browser.click_on("#last")
    found = browser.state()
    assert (found["complete"], found["cells"]) == (complete, 3)
    assert browser.text("#verdict").startswith("Complete" if complete == 3 else "Wrong")


def test_everything_can_be_done_from_the_keyboard(browser, opened):
    opened(build_scene(Topology.grid("4x4")))
    browser.evaluate("document.querySelector('#mesh').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        browser.press(key)
    pointed = "document.querySelector('#status').textContent"
    assert browser.evaluate(pointed).startswith("Chip 1,1, rank 5: 0 of 32 chunks complete.")
    browser.press("ArrowRight", shift=True)
    assert browser.evaluate("document.querySelector('#in-links').value") == "1,1-2,1"
    browser.press("ArrowRight", shift=True)
    browser.press(" ")
    assert "--failed 1x1@1,1 " in browser.text("#command")
    browser.press(" ")
    assert not browser.state()["is_draft"]
    browser.press("p")
    browser.wait("ftmesh.state().is_playing")
    browser.press("p")


def test_every_control_has_a_name(browser, opened):
    opened(build_scene(Topology.grid("4x4")))
    nodes = browser._call("Accessibility.getFullAXTree")["nodes"]
    kinds = {"button", "slider", "radio", "textbox", "combobox", "application", "table", "image"}
    controls = [node for node in nodes if node.get("role", {}).get("value") in kinds]
    names = [node["name"]["value"] for node in controls]
    assert len(names) > 20
    assert all(names)


def test_rounds_are_stepped_through_and_announced(browser, opened):
    result = build_scene(Topology.grid("4x4"), "ring")
    opened(result)
    assert (
        browser.evaluate("document.querySelector('input[name=algorithm]:checked').value") == "ring"
    )
    browser.click_on("#on-one")
    assert browser.text("#round") == "Round 1 of 30"
    browser.click_on("#last")
    browser.click_on("#back-one")
    assert browser.state()["round"] == 29
    facts = browser.text("#facts")
    assert "32 transfers (0 add, 32 copy) over 32 links" in facts
    browser.click_on("#first")
    assert browser.state()["complete"] == 0
    least = limits(Topology.grid("4x4"))
    assert least.why_all_reduce in browser.text("#limit")


def test_light_and_dark(browser, opened):
    opened(build_scene(Topology.grid("4x4")))
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.dark()
    dark = browser.evaluate(ground)
    browser.dark(False)
    light = browser.evaluate(ground)
    assert dark != light
    browser.click_on("#theme")
    assert browser.evaluate(ground) == dark


def frames_of_a_thousand_chips(browser, opened, name, chunks):
    """How the last hundred rounds of a large mesh played, all chunks complete in the end."""
    opened(build_scene(Topology.grid("32x32", failed="4x2@14,14"), name))
    change(browser, "#seek", browser.state()["rounds"] - 100)  # sums all rounds before that, too
    play(browser, 20)
    found = browser.state()
    assert found["complete"] == found["cells"] == 1016 * chunks
    frames = browser.evaluate("ftmesh.frames()")
    assert frames["number"] > 60
    return frames


LARGE = pytest.mark.parametrize(("name", "chunks"), [("row_pair", 1920), ("ring", 2032)])


@pytest.mark.slow
@LARGE
def test_a_thousand_chips_play_on_a_busy_machine(browser, opened, name, chunks):
    frames = frames_of_a_thousand_chips(browser, opened, name, chunks)
    assert frames["quick_work_ms"] < 16  # of a tenth of them
    assert frames["quick_apart_ms"] < 34  # thirty frames a second


@more  # takes a machine that does little else
@pytest.mark.slow
@LARGE
def test_a_thousand_chips_play_smoothly(browser, opened, name, chunks):
    frames = frames_of_a_thousand_chips(browser, opened, name, chunks)
    assert frames["work_ms"] < 16
    assert frames["apart_ms"] < 34  # on a machine that does other things
