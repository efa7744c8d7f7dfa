"""The language model: the same losses on every mesh, rows, checkpoints, the command."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ftmesh
from examples.llm import tokens as text
from examples.llm import train
from examples.llm.checkpoints import open_manager, restore_state, save_state
from examples.llm.config import PRESETS
from examples.llm.data import Rows, batches, open_rows
from examples.llm.model import Transformer
from examples.llm.report import Report
from examples.llm.sharding import Cuts, make_mesh
from examples.llm.step import END, make_step, token_losses, unpack
from ftmesh.command_line import Parser
from ftmesh.elastic import ElasticGroup
from ftmesh.elastic.local_pod import run_pod
from ftmesh.errors import ArgumentError, DataError, TrainingError
from ftmesh.testing import cpu_grid
from tests.support.more import more_case
from tests.support.small_llm import SMALL, TINY, one_device

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("ignore"),  # Orbax warns of its own future, and leaves files open
]

ROOT = Path(__file__).parents[2]
HOLES = {"whole": "", "less 2x2": "2x2@2,2", "less one": "1x1@3,3"}


def losses_on(mesh, config, seed=0):
    """The losses of all steps of a run, and its compiled step."""
    step = make_step(config, mesh)
    state, losses, compiled = step.init(0), [], None
    rows = open_rows(None, None, config)
    cut = step.cuts.rows
    for arrays in batches(rows, config, cut, first_step=0, steps=config.steps, seed=0):
        compiled = compiled or step.train.lower(state, *arrays, seed).compile()
        state, metrics = compiled(state, *arrays, seed)
        losses.append(float(metrics["loss"]))
    return np.array(losses), compiled, state


class TestLosses:
    """Equal to those of one device, with a constant batch that chips need not divide."""

    @pytest.fixture(scope="class")
    def alone(self, quick_compiler):
        return losses_on(one_device(), TINY)[0]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("hole", "replica"),
        [
            ("less 2x2", "2x2"),
            ("less 2x2", "all"),
            *[
                more_case(hole, replica)
                for hole in ("whole", "less one")
                for replica in ("2x1", "2x2", "all")
            ],
            more_case("less 2x2", "2x1"),
        ],
    )
    def test_on_sixteen_chips(self, hole, replica, alone):
        topology = cpu_grid("4x4", failed=HOLES[hole])
        mesh = make_mesh(topology, replica)
        losses, compiled, _ = losses_on(mesh, TINY)
        assert len(losses) == 40
        assert losses[-1] < 0.4 * losses[0]
        np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-5)
        is_whole = replica == "all"
        ranks = topology if is_whole else ftmesh.TiledTopology.from_topology(topology, replica)
        for axis in ("data", "fsdp"):
            audit = ftmesh.audit(compiled, axis, plan=ranks)
            if hole == "whole" or replica != "2x2":
                audit.require_none()
                continue
            # Three tiles around a corner: no ring is clear of the fourth.
            assert audit
            assert all("from tile (1, 0) to (0, 1) crosses" in entry.problem for entry in audit)

    @pytest.mark.slow
    def test_with_dropout_in_parts_on_padded_shards(self):
        """Fifteen chips divide neither 20 rows, nor in two parts, nor a dimension of 48."""
        config = replace(SMALL, dropout=0.2, microbatches=2)
        expected, *_ = losses_on(one_device(), config)
        mesh = make_mesh(cpu_grid("4x4", failed="1x1@3,3"), "all")
        losses, _, state = losses_on(mesh, config)
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
        others, *_ = losses_on(one_device(), config, seed=1)
        assert abs(others - expected).max() > 1e-3
        embedding = state["params"]["embedding"]
        assert embedding.shape == (270, 48)  # 264, padded
        assert embedding.sharding.shard_shape(embedding.shape) == (18, 48)
        assert not np.asarray(embedding)[264:].any()
        assert np.asarray(embedding)[:264].all()


class TestModel:
    def test_documents_do_not_see_each_other(self):
        """Logits of a document are the same alone and after another one in its row."""
        cuts = Cuts(one_device())
        model = Transformer(SMALL, cuts)
        first, second = [5, 6, 7, END], [8, 9, 10, 11, 12]
        rows = np.array([[*first, *second], [*second, *[3] * 4]])
        inputs, _, document, position, counts = unpack(jnp.array(rows))
        assert document.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0] * 8]
        assert position.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [*range(8)]]
        assert counts.tolist() == [[True] * 3 + [False] + [True] * 4, [True] * 8]
        params = model.init(jax.random.key(0), inputs, document, position)
        logits = model.apply(params, inputs, document, position)
        np.testing.assert_allclose(logits[0, 4:], logits[1, :4], atol=1e-5)
        other = model.apply(params, inputs.at[0, 6].set(1), document, position)
        np.testing.assert_array_equal(other[0, :6], logits[0, :6])  # none sees what comes later
        assert abs(other[0, 6:] - logits[0, 6:]).max() > 1e-3

    @pytest.mark.slow
    def test_rows_as_one_document(self):
        """With attend="row", tokens see those before the end of a document as any others."""
        config = replace(SMALL, attend="row")
        model = Transformer(config, Cuts(one_device()))
        rows = jnp.array([[5, 6, 7, END, 8, 9, 10, 11, 12]])
        inputs, _, document, position, _ = unpack(rows)
        params = model.init(jax.random.key(0), inputs, document, position)
        logits = model.apply(params, inputs, document, position)
        whole = Transformer(SMALL, Cuts(one_device()))
        expected = whole.apply(params, inputs, document * 0, jnp.arange(8)[None])
        np.testing.assert_allclose(logits, expected, atol=1e-5)

    def test_losses_are_cross_entropies_and_z_losses(self):
        logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
        targets = np.array([[0, 1, 2], [3, 4, 0]])
        log_z = np.log(np.exp(logits).sum(-1))
        right = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
        expected = log_z - right + 0.1 * log_z**2
        np.testing.assert_allclose(token_losses(logits, targets, 0.1), expected, rtol=1e-5)

    @pytest.mark.parametrize("name", PRESETS)
    def test_the_number_of_weights(self, name):
        config = PRESETS[name]
        types = make_step(config, one_device()).types["params"]
        assert config.num_params == sum(leaf.size for leaf in jax.tree.leaves(types))
        expected = {"tiny": 0.1e6, "124m": 124e6, "1b": 1.24e9, "8b": 8.03e9}[name]
        assert config.num_params == pytest.approx(expected, rel=0.1)

    def test_heads_that_do_not_divide(self):
        with pytest.raises(ArgumentError, match="3 key heads do not divide 4 query heads"):
            replace(TINY, num_kv_heads=3)


class TestData:
    def test_rows_overlap_by_a_token(self):
        rows = Rows(np.arange(11, dtype=np.uint16), 5)
        assert len(rows) == 2
        assert rows.read(np.array([1, 0])).tolist() == [[5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5]]

    @pytest.mark.parametrize("suffix", [".npy", ".txt", ".jsonl"])
    def test_files(self, suffix, tmp_path):
        path, encode = tmp_path / f"text{suffix}", text.make_encoder(None)[0]
        documents = ["one\ntwo\n", "three\n"]
        expected = [*encode(documents[0]), END, *encode(documents[1]), END]
        if suffix == ".npy":
            np.save(path, np.array(expected, np.uint16))
        elif suffix == ".txt":
            path.write_text("\n".join(documents))
        else:
            path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
        assert text.read_tokens(path, encode).tolist() == expected

    def test_a_tokenizer_of_ones_own(self, tmp_path):
        pytest.importorskip("tokenizers")
        path, out = tmp_path / "text.txt", tmp_path / "tokenizer.json"
        path.write_text("the cat and the dog and the cat\n" * 20)
        assert text.main(["train", "--vocabulary", "270", str(path), "--out", str(out)]) == 0
        encoded = tmp_path / "tokens.npy"
        command = ["encode", str(path), "--tokenizer", str(out), "--out", str(encoded)]
        assert text.main(command) == 0
        tokens = np.load(encoded)
        assert tokens.dtype == np.uint16
        assert tokens[-1] == END
        assert 0 < tokens[:-1].min() <= tokens.max() < 270
        assert len(tokens) < len(path.read_text())

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.jsonl", b'{"txt": 1}\n', 'a.jsonl, line 1: not an object with "text"'),
            ("a.bin", b"", "is not .npy"),
            ("a.npy", b"no array", "cannot be read"),
            ("a.txt", b"short", "6 tokens are 0 rows of 32, and a step takes 20"),
        ],
    )
    def test_bad_files_are_rejected(self, name, content, message, tmp_path):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_rows(path, None, SMALL)
        with pytest.raises(DataError, match="no data at"):
            open_rows(tmp_path / "missing.txt", None, SMALL)

    def test_more_kinds_than_the_model_has(self, tmp_path):
        np.save(tmp_path / "a.npy", np.full(2000, 300))
        with pytest.raises(DataError, match=r"token 300, and the model 264.*vocabulary=301"):
            open_rows(tmp_path / "a.npy", None, SMALL)


class TestCheckpoints:
    def test_on_other_chips(self, tmp_path):
        """Saved on fifteen chips, with padding; restored on six replicas of two, without."""
        saved = make_step(SMALL, make_mesh(cpu_grid("4x4", failed="1x1@3,3"), "all"))
        state = saved.init(0)
        group = ElasticGroup()
        with open_manager(str(tmp_path / "run"), group, every=10, keep=2) as manager:
            save_state(manager, 1, state, force=False)  # Orbax always saves the first time
            save_state(manager, 2, state, force=False)
            assert manager.latest_step() == 1
            save_state(manager, 4, state, force=True)
        step = make_step(SMALL, make_mesh(cpu_grid("4x4", failed="2x2@2,2"), "2x1"))
        with open_manager(str(tmp_path / "run"), group, every=10, keep=2) as manager:
            assert manager.latest_step() == 4
            restored = restore_state(manager, step.types, 4)
        for got, expected, kind in zip(
            *map(jax.tree.leaves, (restored, step.init(0), step.types)), strict=True
        ):
            assert got.sharding == kind.sharding
            np.testing.assert_array_equal(got, expected)


class TestCommand:
    def test_settings(self):
        parser = Parser()
        parser.add_argument("--set", action="append", default=[])
        args = parser.parse_args(["--set", "dtype=bfloat16", "--set", "tied=true"])
        config = train.config_from(TINY, args)
        assert config == replace(TINY, dtype=jnp.dtype("bfloat16"), tied=True)

    @pytest.mark.parametrize(
        ("setting", "line"),
        [
            ("depth=3", "'depth=3' sets no field: give NAME=VALUE"),
            ("num_params=3", "'num_params=3' sets no field"),
            ("unrolled", "'unrolled' sets no field: give NAME=VALUE"),
            ("unrolled=maybe", "unrolled=maybe: give true or false"),
            ("num_layers=three", "num_layers=three: invalid literal"),
            ("logits=int32", "logits is int32: give float32 or bfloat16"),
        ],
    )
    def test_bad_settings(self, setting, line, capsys):
        assert train.main(["--set", setting]) == 2
        assert line in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("setting", "line"),
        [
            ("length=0", "length is 0: give 1 or more"),
            ("remat=foo", "remat is 'foo': give one of none, dots, full"),
        ],
    )
    def test_settings_out_of_range(self, setting, line, capsys):
        assert train.main(["--set", setting]) == 2
        assert line in capsys.readouterr().err

    def test_a_loss_that_is_not_finite(self, tmp_path):
        report = Report(TINY, one_device(), str(tmp_path / "metrics.jsonl"), 1)
        report.step(1, {"loss": 2.5})
        report.step(2, {"loss": float("nan")})
        assert report.losses == {1: 2.5}
        with pytest.raises(TrainingError, match="the loss of step 2 is nan"):
            report.settle()


FAST_COMPILE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.slow
def test_hosts_with_different_numbers_of_chips(tmp_path):
    """A host that has lost one of its two chips has fewer rows, some of which are padding."""
    config = replace(TINY, num_layers=1, batch=20)
    expected, *_ = losses_on(one_device(), config)
    metrics = tmp_path / "metrics.jsonl"
    trainer = (
        f"-m examples.llm.train --steps 3 --set num_layers=1 --set batch=20 --metrics {metrics}"
    )
    env = {"PYTHONPATH": str(ROOT), "FTMESH_FAILED": "1x1@0,0"} | FAST_COMPILE
    results = run_pod([sys.executable, *trainer.split()], 2, 2, "2x2", env=env, timeout=600)
    assert [result.status for result in results] == [0, 0], results
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    np.testing.assert_allclose(losses, expected[:3], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_lost_host(tmp_path):
    """Two hosts go on from what is left of three, in place, and save with Orbax."""
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "run"
    config = replace(TINY, num_layers=1, batch=12)
    expected, *_ = losses_on(one_device(), config)
    launch = "launch --hosts 3 --devices-per-host 2 --mesh 2x3 --failures 3 --events"
    trainer = "-m examples.llm.train --replica 2x1 --steps 12 --set num_layers=1 --set batch=12"
    files = ["--metrics", metrics, "--checkpoint-dir", folder, "--checkpoint-every", "5"]
    events = tmp_path / "events.jsonl"
    command = [
        sys.executable,
        "-m",
        "ftmesh",
        *launch.split(),
        events,
        "--",
        sys.executable,
        *trainer.split(),
    ]
    done = subprocess.run(
        list(map(str, [*command, *files])),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **FAST_COMPILE,
            "FTMESH_FAULTS": "kill@2:7",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    started = [json.loads(line) for line in events.read_text().splitlines()]
    ways = [(e["in_place"], e["live"]) for e in started if e["event"] == "epoch"]
    assert ways == [(False, 6), (True, 4)]
    losses = {}
    for line in map(json.loads, metrics.read_text().splitlines()):
        losses[line["step"]] = line["loss"]
    assert sorted(losses) == [*range(1, 13)]
    for number, loss in losses.items():
        assert loss == pytest.approx(expected[number - 1], abs=1e-5), number
    assert {path.name for path in folder.iterdir()} >= {"10", "12"}
