"""Type checkers accept correct user code against the installed package, and reject mistakes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="pip install 'ftmesh[test]'")

USER_CODE = Path(__file__).parent / "typing" / "user_code.py"

CONFIG = """\
[mypy]
strict = true

[mypy-jax.*,optax.*]
follow_imports = skip
ignore_missing_imports = true
"""

# What is replaced in a copy of the user's code, and the error code that mypy reports for it.
MISTAKES = [
    ("bucket_bytes=2**20", 'bucket_bytes="1MB"', "arg-type"),
    ("accumulate_dtype=np.float32", "acumulate_dtype=np.float32", "call-arg"),
    ("plan=protocol", "plan=topology_name", "name-defined"),
    ("scatter_dimension=0", "dimension=0", "call-arg"),
    ("axis=0, tiled=True", "axes=0, tiled=True", "call-arg"),
    ("per_rank=False", "per_ranks=False", "call-arg"),
    ("for_ranks(plan, 512)", 'for_ranks("8x8", 512)', "arg-type"),
    ("ftmesh.limits(", "ftmesh.limit(", "attr-defined"),
    ('ftmesh.plan(tiles, "auto"', 'ftmesh.plan("8x8", "auto"', "arg-type"),
    ("mesh=plan.jax_mesh", "messh=plan.jax_mesh", "call-arg"),
    ("timeout=60.0", 'timeout="60 s"', "arg-type"),
    ("chips=4", "chip=4", "call-arg"),
    ("resume=True", "resumes=True", "call-arg"),
]


def test_mypy_accepts_user_code_and_rejects_mistakes(tmp_path):
    source = USER_CODE.read_text()
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "correct.py").write_text(source)
    for number, (text, mistake, _) in enumerate(MISTAKES):
        assert source.count(text) == 1, text
        (tmp_path / f"mistake_{number}.py").write_text(source.replace(text, mistake))
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = re.findall(r"^(\w+)\.py:\d+: error: .*  \[([\w-]+)\]$", done.stdout, re.MULTILINE)
    expected = {(f"mistake_{number}", code) for number, (*_, code) in enumerate(MISTAKES)}
    assert set(errors) == expected, done.stdout + done.stderr
