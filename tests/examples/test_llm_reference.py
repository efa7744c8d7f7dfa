"""The language model beside PyTorch's: the same results, and the benchmark that times both."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ftmesh
from examples.llm import bench_step
from examples.llm.model import Transformer
from examples.llm.sharding import Cuts, make_mesh
from examples.llm.step import token_losses, unpack
from ftmesh.errors import TrainingError
from tests.support import torch_llm as reference
from tests.support.torch_resnet50 import summary

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated"),
]

FILE = Path(__file__).parents[1] / "data" / "llm_reference.npz"
TOLERANCE = 1e-5  # both compute in float32


def flax_results(config):
    mesh = make_mesh(ftmesh.Topology.from_devices(jax.devices()[:1], shape="1x1"), "1x1")
    model = Transformer(config, Cuts(mesh))
    inputs, targets, document, position, counts = unpack(jnp.array(reference.rows()))

    @jax.jit
    def results(params):
        def loss_of(params):
            logits = model.apply({"params": params}, inputs, document, position)
            losses = token_losses(logits, targets, config.z_loss)
            return (losses * counts).sum() / counts.sum(), logits

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    (loss, logits), gradients = results(reference.params(config))
    return {"logits": logits, "loss": loss, "gradients": reference.flat(gradients)}


def assert_near(ours, theirs, scale=None):
    """Equal within the tolerance times the largest value of the array, or of its source."""
    scale = np.abs(theirs).max() if scale is None else scale
    assert np.abs(np.asarray(ours) - theirs).max() <= TOLERANCE * scale


@pytest.mark.parametrize("how", [{}, {"unrolled": True, "remat": "none"}, {"unrolled": True}])
def test_matches_the_stored_torch_reference(how):
    ours = summary(flax_results(replace(reference.CONFIG, **how)))
    with np.load(FILE) as theirs:
        assert list(ours["names"]) == list(theirs["names"])
        for key in ("logits", "loss", "norms"):
            assert_near(ours[key], theirs[key])
        for mine, other, norm in zip(
            ours["entries"], theirs["entries"], theirs["norms"], strict=True
        ):
            assert_near(mine, other, norm)


@pytest.mark.parametrize("tied", [False, True])
def test_matches_torch(tied):
    pytest.importorskip("torch")
    config = replace(reference.CONFIG, tied=tied)
    ours, theirs = flax_results(config), reference.torch_results(config)
    for key in ("logits", "loss"):
        assert_near(ours[key], theirs[key])
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, gradient in theirs["gradients"].items():
        assert_near(ours["gradients"][name], gradient, np.linalg.norm(gradient))


class TestBenchmark:
    @pytest.fixture(autouse=True)
    def one_device(self, monkeypatch):
        devices = jax.devices()[:1]
        monkeypatch.setattr(jax, "devices", lambda: devices)

    def measure(self, capsys, *arguments):
        small = (
            "--preset tiny --batch 2 --steps 1 --set num_layers=1 --set length=16 --set remat=none"
        )
        status = bench_step.main([*small.split(), *arguments])
        return status, capsys.readouterr()

    def test_variants(self, capsys):
        """One that fails does not stop the others; all begin with the same weights."""
        fast = "attend=row unrolled=true"
        variants = ["--variant", "", "--variant", "attention=cudnn", "--variant", fast]
        status, printed = self.measure(capsys, *variants, "--json")
        result = json.loads(printed.out)
        assert status == 0
        assert [*result["tokens/s"]] == ["ftmesh", f"ftmesh, {fast}"]
        assert min(result["tokens/s"].values()) > 0
        losses = [*result["first loss"].values()]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert losses[0] == pytest.approx(np.log(264), rel=0.1)
        assert result["failed"]["ftmesh, attention=cudnn"].startswith("RuntimeError: cuDNN")

    def test_lines(self, capsys):
        status, printed = self.measure(capsys, "--variant", "num_layers=2", "--variant", "")
        assert status == 0
        first, works, fails = printed.out.splitlines()
        assert first == "tiny, 2 rows of 16 tokens (1 x cpu)"
        assert works.startswith("  ftmesh: ")
        assert fails.startswith("  ftmesh, num_layers=2: failed: ")

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["--variant", "batch=4"], "variants have other batches: give --batch"),
            (["--set", "batch=4"], "give the number of rows by --batch"),
            (["--torch", "--set", "dropout=0.1"], "no dropout and no microbatches"),
        ],
    )
    def test_bad_arguments(self, arguments, line, capsys):
        status, printed = self.measure(capsys, *arguments)
        assert status == 2
        assert line in printed.err

    def test_none_that_works(self, capsys):
        status, printed = self.measure(capsys, "--variant", "attention=cudnn")
        assert status == TrainingError.status
        assert "ftmesh, attention=cudnn: RuntimeError: cuDNN is not detected." in printed.err

    def test_a_wrong_first_loss_is_a_failure(self):
        programs = {"a": lambda _: 5.0, "b": lambda _: 5.04, "c": lambda _: 5.1}
        programs["d"] = lambda _: float("nan")
        losses, failures = bench_step.working(programs)
        assert losses == {"a": 5.0, "b": 5.04}
        assert failures["c"] == "TrainingError: the first loss is 5.1, and 5.0 of a"
        assert failures.keys() == {"c", "d"}
