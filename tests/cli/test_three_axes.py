"""Commands accept three-dimensional meshes, and blocks WxHxD@x,y,z."""

import json

import pytest

MESH = ["3x2x4", "--failed", "2x1x1@0,0,1", "--failed-links", "2,1,0-2,1,1;0,1,0-0,1,3"]
MESH += ["--wrap", "z"]


def test_plan_and_verify(run, tmp_path):
    path = str(tmp_path / "plan.npz")
    status, out, _ = run("plan", *MESH, "--payload", "1MB", "--out", path)
    assert status == 0
    assert "3x2x4 (wrapping in z) less 2x1x1@0,0,1 less links 0,1,0-0,1,3;2,1,0-2,1,1: 22" in out
    status, out, _ = run("verify", path)
    assert status == 0
    assert "verified: 22 ranks" in out
    assert run("draw", path)[0] == 0


def test_simulate_and_limits(run):
    data = json.loads(run("simulate", *MESH, "--payload", "1MB", "--json")[1])
    costs = {result["algorithm"]: result for result in data if "time_us" in result}
    assert {"tree", "flood"} <= set(costs)
    assert all(cost["time_us"] >= cost["limit_us"] > 0 for cost in costs.values())
    limits = json.loads(run("limits", *MESH, "--json")[1])
    assert (limits["live"], limits["links"]) == (22, 52 - 8 - 2)


def test_advise(run):
    often = ["--runs", "1", "--horizon", "10d", "--payload", "1MB", "--json"]
    data = json.loads(run("advise", *MESH, *often)[1])
    assert data["boards"] == 8
    assert data["at_hand"]["best"] == "fault-tolerant"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--failed", "2x2@0,0"], "block 2x2@0,0 does not have the 3 axes of mesh 4x4x4"),
        (["--failed", "1x1x2@0,0,3"], "not inside mesh 4x4x4, whose chips are 0,0,0 to 3,3,3"),
        (["--failed", "2x2x@0,0,0"], "or on three axes WxHxD@x,y,z"),
        (["--failed-links", "0,0,0-0,0,2"], "(0, 0, 2) is not a neighbour of (0, 0, 0)"),
        (["--wrap", "w"], "mesh 4x4x4 has no axis 'w'"),
        (["--failed", "4x4x1@0,0,1;4x4x1@0,0,3"], "16 chips around (0, 0, 0), 16 chips around"),
    ],
)
def test_bad_arguments(run, options, message):
    status, _, err = run("plan", "4x4x4", *options)
    assert status == (69 if "around" in message else 2)  # no plan, or a bad command line
    assert message in err
