"""The plot of a run that loses a host next to one that does not."""

import json
import re

import pytest

from examples.soak.picture import FinishedRun, difference, draw
from ftmesh.draw.plots import save


def trained(folder, *, lost):
    """Six steps of half a second on 16 chips, or on 12 from the fourth on, 8 s later."""
    (folder / "out").mkdir(parents=True)
    lines = [
        {
            "step": step,
            "loss": 6.0 / step,
            "lr": 1,
            "time": 100 + step / 2 + 8 * (lost and step > 3),
        }
        for step in range(1, 7)
    ]
    events = []
    if lost:
        lines.insert(3, {"step": 3, "epoch": 2, "live": 12, "time": 108})
        events = [{"event": "failed"}, {"event": "goes on", "seconds": 8.5}]
    for name, each in (("out/metrics.jsonl", lines), ("events.jsonl", events)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in each))
    return FinishedRun(folder)


def test_the_plot_has_the_pause_and_the_chips(tmp_path):
    calm, lost = (trained(tmp_path / str(each), lost=each) for each in (False, True))
    assert lost.pause == 8.5
    assert lost.seconds == {1: 0, 2: 0.5, 3: 1, 4: 9.5, 5: 10, 6: 10.5}
    assert difference(calm.losses, lost.losses) == 0
    save(draw(calm, lost, "one is killed"), tmp_path / "both.svg")
    texts = re.findall(r"<!-- (.*) -->", (tmp_path / "both.svg").read_text())
    assert {"12 chips", "8.5 s, then 12 chips", "undisturbed", "with a host lost"} <= set(texts)


def test_difference_of_losses():
    assert difference({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.5}) == 0.5
    with pytest.raises(SystemExit, match=r"lacks the losses of steps \[2\]"):
        difference({1: 2.0, 2: 1.0}, {1: 2.0})
