"""Bad command lines are rejected in one line, with a status, and nothing is written."""

import pytest

STATUS = {  # of well-formed command lines that cannot work; all others end with 2
    "plan 8x8 --failed 3x2@2,2 --algorithm ring": 69,
    "plan 8x8 --failed 2x2@2,2;2x2@3,2 --algorithm ring": 69,
    "plan 8x8 --failed 8x2@0,2": 69,
    "plan 1x8 --failed 1x1@0,3": 69,
    "plan 8 --failed-links 3-4": 69,
    "plan 1x8 --algorithm ring": 69,
    "plan 4x4x4 --algorithm row_pair": 69,
    "plan 8x8 --round 999": 69,
    "advise 8x8 --model-bytes 5GB --memory 1MB": 69,
    "draw --figure 11": 69,
    "draw 8x8 --phase 9": 69,
    "verify missing.npz": 66,
    "plan 1000x1000": 69,
    "limits 1000x1000": 69,
}
DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("plan 8x8 --failed 2x2@7,7", "2x2@7,7 is not inside mesh 8x8"),
        ("plan 8x8 --failed 3x2@2,2 --algorithm ring", "only partly failed; use row_pair"),
        ("plan 8x8 --failed 2x2@2,2;2x2@3,2 --algorithm ring", "only partly failed"),
        ("plan 8x8 --failed 8x2@0,2", "32 chips around (0, 4), 16 chips around (0, 0)"),
        ("plan 1x8 --failed 1x1@0,3", "4 chips around (0, 4), 3 chips around (0, 0)"),
        ("plan 8 --failed-links 3-4", "4 chips around (0,), 4 chips around (4,)"),
        ("plan 1x8 --algorithm ring", "of 2 chips or more each, not 1x8; use chain"),
        ("plan 4x4 --failed 4x4@0,0", "all 16 chips of mesh 4x4 have failed"),
        ("plan 8by8", "'8by8' is not a mesh shape"),
        ("plan 8x8 --failed board", "'board' is not a block"),
        ("plan 8x8 --payload much", "'much' is not a size"),
        ("plan 8x8 --wrap z", "has no axis 'z'"),
        ("plan 8x8 --round 999", "round 999 does not exist"),
        ("plan 8x8 --algorithm fastest", "invalid choice: 'fastest'"),
        ("plan", "the following arguments are required: MESH"),
        ("fly", "invalid choice: 'fly'"),
        ("verify missing.npz", "missing.npz: there is no such file"),
        ("draw", "give a MESH such as 8x8"),
        ("draw 8x8 --figure 3", "give --figure alone"),
        ("draw --figure 3 --failed 2x2@0,0", "give --figure alone"),
        ("draw --figure 3 --round 1", "give --figure alone"),
        ("draw --figure 3 --lane 0", "give --figure alone"),
        ("draw --figure 3 --half 0", "give --figure alone"),
        ("draw --figure 3 --phase 0", "give --figure alone"),
        ("draw --figure 3 --wrap x", "give --figure alone"),
        ("draw --figure 3 --tile 2x2", "give --figure alone"),
        ("draw --figure 3 --failed-links 0,0-0,1", "give --figure alone"),
        ("draw --figure 3 --algorithm ring", "give --figure alone"),
        ("draw a.npz --algorithm ring", "leave out the other options"),
        ("plan 2x2x2x2", "one to three axes"),
        (
            "plan 4x4x4 --algorithm row_pair",
            "2 chips or more each, not 4x4x4; use two_dim or ring",
        ),
        ("plan 9999x9999", "has more than 1,000,000 chips"),
        ("plan 4x4 --failed-links 4,0-4,1", "is not a neighbour"),
        ("plan 4x4 --failed-links 0-1", "is not a neighbour"),
        ("draw --figure 11", "the paper has no figure 11"),
        ("draw 8x8 --phase 9", "phase 9 does not exist"),
        ("draw 8x8 --round 1", "give --phase too"),
        ("plan 1000x1000", "1,000,000 live chips, and a schedule for all of them would take"),
        ("limits 1000x1000", "would take about 112 TB: the limit is 16,384"),
        ("plan 4x4 --link 50Gb/s", "'50Gb/s' reads as bits per second: write bytes"),
        ("plan 4x4 --link 50gb/s", "'50gb/s' reads as bits per second"),
        ("plan 4x4 --payload 100Mb", "'100Mb' reads as bits"),
        (f"plan {DIGITS}x2", "is not a mesh shape"),
        (f"plan 4x4 --failed 1x1@{DIGITS},0", "is not a block"),
        (f"plan 4x4 --failed-links {DIGITS}-1", "is not a link"),
        (f"plan 4x4 --payload {DIGITS}", "bytes at most, not '9999"),
        (f"plan 4x4 --latency {DIGITS}s", "the longest time allowed"),
        (f"plan 4x4 --round {DIGITS}", "is not a whole number from 0 to 2,147,483,647"),
        ("draw 4x4 --phase -1", "-1 is not from 0 to"),
        ("advise 4x4 --seed -1", "-1 is not from 0 to 4,294,967,295"),
        ("advise 4x4 --runs 99999999999999", "is not a whole number from 1 to 10,000"),
        ("advise 8x8 --mtbf 1min", "failures in all, and at most 100,000 are simulated"),
        ("advise 8x8 --model-bytes 5Gb", "reads as bits: write bytes with a capital B"),
        ("advise 8x8 --model-bytes much", "'much' is not a size"),
        ("advise 8x8 --model-bytes 0GB", "model_bytes must be a positive whole number"),
        ("advise 8x8 --memory 16GB", "--memory says which replicas fit: give --model-bytes too"),
        ("advise 8x8 --model-bytes 5GB --memory 1MB", "nothing fits: over all 64 live chips"),
        ("advise 8x8 --model-bytes 5GB --plot a.svg", "leave it out with --model-bytes"),
        ("bench 4x4 --payloads 900TB", "would take about"),
        ("bench 4x4 --payloads 0", "each of --payloads must be a positive whole number, not 0"),
        ("bench 4x4 --payloads 4KB,,1MB", "'' is not a size"),
        ("plan ٤x٤", "'٤x٤' is not a mesh shape"),
        ("plan 4x4 --failed 1x1@٠,0", "is not a block"),
        ("plan 4x4 --payload ٣MB", "is not a size"),
        ("draw 4x4 --phase 0 --lane -1", "-1 is not from 0 to"),
        ("draw 4x4 --phase 0 --lane ٣", "is not a whole number"),
        ("draw 4x4 --half ١", "is not a whole number"),
        ("view 4x4 --serve 65536", "65536 is not from 0 to 65,535"),
        ("view 4x4 --serve ٣", "is not a whole number"),
        ("doctor --timeout ٣", "is not a number from 0.001"),
        ("doctor --process-id -1", "-1 is not from 0 to"),
        ("bench 4x4 --payloads 900000GB", "would take about"),
        ("bench 4x4 --repeats 0", "0 is not from 1 to 1,000"),
    ],
)
def test_bad_input_gets_one_line_and_a_status(run, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    outputs = ["--out", "a.npz", "--svg", "a.svg"] if argv.startswith("plan ") else []
    status, out, error = run(*argv.split(), *outputs)
    assert status == STATUS.get(argv, 2)
    assert message in error
    assert error.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_unwritable_output_is_rejected_first(run, tmp_path):
    status, _, error = run("plan", "64x64", "--out", str(tmp_path / "no" / "a.npz"))
    assert (status, "there is no folder" in error) == (2, True)
    status, _, error = run("draw", "8x8", "--svg", str(tmp_path))
    assert (status, "it is a folder" in error) == (2, True)


def test_two_outputs_need_two_paths(run, tmp_path):
    path = str(tmp_path / "a")
    status, _, error = run("plan", "4x4", "--out", path, "--svg", path)
    assert (status, "two outputs at once" in error) == (2, True)


def test_two_names_of_one_file_are_rejected(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = run("plan", "4x4", "--out", "same", "--svg", "./same")
    assert (status, "two outputs at once" in error) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_damaged_file(run, tmp_path):
    path = tmp_path / "a.npz"
    run("plan", "4x4", "--out", str(path))
    path.write_bytes(path.read_bytes()[:500])
    status, _, error = run("verify", str(path))
    assert status == 69
    assert error.count("\n") == 1
    assert "damaged or truncated" in error
