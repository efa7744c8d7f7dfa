"""The page is one self-contained file, and the command writes it."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from ftmesh.algorithms import registry
from ftmesh.cli.main import main
from ftmesh.schedule.files import save
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.view.page import SCRIPTS, build_scene, render_page


@pytest.fixture(scope="module")
def html():
    return render_page([build_scene(Topology.grid("4x4", failed="2x2@0,0"))], options="--tpu v3")


def data_of(html):
    return json.loads(re.search(r'id="scenes">(.*?)</script>', html)[1])


def test_it_loads_nothing(html):
    assert "://" not in html
    assert re.findall(r'(?:src|href)="(.*?)"', html) == ["data:,"]
    assert "{{" not in html
    assert not re.search(r"@import|url\(|import\(|^import |eval\(|innerHTML", html, re.MULTILINE)


def test_content_policy_allows_only_its_own_scripts(html):
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', html)[1]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    for kind, text in (
        ("script-src", re.search(r'type="module">(.*?)</script>', html, re.DOTALL)[1]),
        ("style-src", re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert "connect-src 'self'" in render_page([], plans_at="plan")


def test_it_contains_its_scenes(html):
    found = data_of(html)
    assert [one["mesh"]["name"] for one in found["scenes"]] == ["4x4 less 2x2@0,0"]
    assert (found["options"], found["plans_at"]) == ("--tpu v3", None)


def test_scenes_cannot_end_the_script():
    scene = build_scene(Topology.grid("4x4"))
    scene["limit_why"] = "</script><script>alert(1)</script><!--"
    found = data_of(render_page([scene]))
    assert found["scenes"][0]["limit_why"] == scene["limit_why"]


def test_every_script_is_used_and_small():
    assets = files("ftmesh.view") / "assets"
    here = {path.name for path in assets.iterdir() if path.name.endswith(".js")}
    assert here == set(SCRIPTS)
    for name in SCRIPTS:
        lines = (assets / name).read_text().splitlines()
        assert lines[0].startswith("// ")
        assert len(lines) < 250
        assert max(map(len, lines)) <= 100


def test_the_command_writes_the_page(tmp_path, capsys):
    out = tmp_path / "view.html"
    options = "--failed 2x2@2,0 --payload 1MB --link 10GB/s --out"
    assert main(["view", "6x4", *options.split(), str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("6x4 less 2x2@2,0: tree is shown first, of 4 that work")
    assert text.endswith(f"wrote {out}\n")
    found = data_of(out.read_text())
    assert len(found["scenes"]) == 1
    assert found["options"] == "--link 10GB/s"
    assert "links of 10 GB/s" in found["scenes"][0]["network"]


def test_a_saved_schedule_is_shown(tmp_path, capsys):
    file, out = tmp_path / "plan.npz", tmp_path / "view.html"
    schedule = registry.build_schedule(Topology.grid("4x4", failed="2x2@0,0"), "ring")
    save(replace(schedule, algorithm="my own"), file)
    assert main(["view", str(file), "--payload", "1MB", "--out", str(out)]) == 0
    assert "4x4 less 2x2@0,0: my own is shown first, of 1" in capsys.readouterr().out
    (found,) = data_of(out.read_text())["scenes"]
    assert (found["auto"], found["shown"]) == (None, "my own")
    mine = found["algorithms"][-1]
    assert (mine["algorithm"], mine["rounds"]) == ("my own", schedule.num_rounds)
    assert main(["view", str(file), "--wrap", "x", "--out", str(out)]) == 2
    assert "leave out the other options" in capsys.readouterr().err
    save(
        registry.build_schedule(TiledTopology.from_topology(Topology.grid("4x4"), "2x1"), "ring"),
        file,
    )
    assert main(["view", str(file), "--out", str(out)]) == 2
    assert "the page cannot show tiles" in capsys.readouterr().err


def test_a_small_mesh_includes_the_loss_of_every_chip(tmp_path):
    out = tmp_path / "view.html"
    assert main(["view", "2x2", "--algorithm", "auto", "--devices", "2", "--out", str(out)]) == 0
    found = data_of(out.read_text())["scenes"]
    assert [one["mesh"]["failed"] for one in found] == [
        [], [[0, 0]], [[1, 0]], [[0, 1]], [[1, 1]],
    ]  # fmt: skip
    assert {one["mesh"]["devices_per_chip"] for one in found} == {2}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("view 64x64", "the page shows meshes of up to 1,024 chips"),
        ("view 8x8 --failed 1x8@1,0", "cut into 2 parts"),
        ("view 8x8 --failed 2x2@2,2 --algorithm two_dim", "use row_pair or ring"),
        ("view 8x8 --serve --out a.html", "give one of the two"),
        ("view 8x8 --out no/a.html", "there is no folder"),
        ("view 8x8 --payload 0MB", "must be a positive whole number"),
        ("view 1x1", "nothing to sum"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, argv, says):
    monkeypatch.chdir(tmp_path)
    is_plan_error = says in ("cut into 2 parts", "use row_pair or ring", "nothing to sum")
    assert main(argv.split()) == (69 if is_plan_error else 2)
    out, error = capsys.readouterr()
    assert says in error
    assert (out, error.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []
