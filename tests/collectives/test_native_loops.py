"""Loops over jit train the same around a hole when one line is changed: their mesh."""

import numpy as np
import pytest

import ftmesh
from ftmesh.testing import cpu_grid
from tests.collectives.test_loops import MESH, train
from tests.support.more import more_case
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def plan():
    """Twelve of sixteen chips, around a hole in the middle."""
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@1,1"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("jit_linen", {}),
        ("jit_nnx", {}),
        ("over_shard_map", {}),
        more_case("scan_transformer", {}),
        slow("scan_transformer", {"fsdp": True}),
    ],
    ids=["jit_linen", "jit_nnx", "over_shard_map", "scan_transformer", "scan_transformer_fsdp"],
)
def test_one_line_changes(plan, name, options):
    whole = cpu_grid("4x3").devices  # a mesh of the same size without a hole
    expected, _ = train(name, [], whole, **options)
    losses, lowered = train(name, [MESH], plan.topology.devices, plan, **options)
    assert len(losses) == 20
    assert losses[-5:].mean() < 0.8 * losses[0], "it must learn for the test to mean something"
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    audit = ftmesh.audit(lowered, "data", plan=plan)
    audit.require_none()
    kinds = {entry.kind for entry in audit.native}
    assert "all-reduce" in kinds
    assert ("all-gather" in kinds) == bool(options)
    assert all(entry.seconds > 0 for entry in audit.native)


def test_pmap_changes_its_devices(plan):
    expected, _ = train("over_pmap", [], cpu_grid("4x3").devices)
    losses, lowered = train("over_pmap", [], list(plan.jax_mesh("batch").devices))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    audit = ftmesh.audit(lowered, "batch", plan=plan)
    audit.require_none()
    assert {entry.kind for entry in audit.native} == {"all-reduce"}


def test_devices_in_another_order_are_found(plan):
    by_id = sorted(plan.topology.devices, key=lambda device: device.id)
    _, lowered = train("jit_linen", [], by_id, steps=1)
    audit = ftmesh.audit(lowered, "data", plan=plan)
    assert len(audit) > 0
    assert all("crosses failed chips or links" in entry.problem for entry in audit)


def test_padded_batch(plan):
    """50 examples on 12 devices, which JAX cannot place; the losses are those of one device."""
    padded = [
        ("import jax\n", "import jax\nimport ftmesh\n"),
        (
            "images, labels = jax.device_put(batch, sharded)",
            "(images, labels), mask = jax.device_put(ftmesh.pad_batch(batch, plan), sharded)",
        ),
        ("labels).mean()", "labels).mean(where=mask)"),
        ("def step(state, images, labels)", "def step(state, images, labels, mask)"),
        ("loss = step(state, images, labels)", "loss = step(state, images, labels, mask)"),
        ("step.lower(state, images, labels)", "step.lower(state, images, labels, mask)"),
    ]
    expected, _ = train("jit_linen", [], plan.topology.devices[:1], size=50)
    losses, lowered = train("jit_linen", [MESH, *padded], plan.topology.devices, plan, size=50)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    ftmesh.audit(lowered, "data", plan=plan).require_none()


@pytest.mark.slow
def test_padded_batch_of_a_language_model(plan):
    """25 sequences on 12 devices: padding goes into the mask of tokens, and no loss changes."""
    place = "batch = jax.device_put(batch, sharded)"
    padded = [
        ("import jax\n", "import jax\nimport ftmesh\n"),
        (
            place,
            "batch, real = ftmesh.pad_batch(batch, plan);"
            f'batch["mask"] = batch["mask"] * real[:, None]; {place}',
        ),
    ]
    expected, _ = train("scan_transformer", [], plan.topology.devices[:5], size=25)
    losses, lowered = train(
        "scan_transformer", [MESH, *padded], plan.topology.devices, plan, size=25
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    ftmesh.audit(lowered, "data", plan=plan).require_none()
