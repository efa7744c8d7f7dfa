"""Suspicion: a loss that is no number, or parameters that differ where they must be equal.

Whoever is found to be sick is masked, and the run goes on without it from the last step that
counts; so what looks suspicious is looked at before a step counts.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from examples.common.trainer import State, Trainer
from ftmesh.errors import TrainingError
from ftmesh.health.doctor import examine
from ftmesh.health.replica_check import check_equal
from ftmesh.testing import fault_injection
from ftmesh.topology.notation import format_failed

EXAMINE = 120.0  # seconds for every chip and link to answer


class Suspicion:
    """Looks at the results of steps. What is sick is masked: then it does not come back."""

    def __init__(self, trainer: Trainer) -> None:
        self._parallel = trainer.parallel
        self._topology = trainer.parallel.ranks.topology

    def look_at(self, step: int, loss: Any) -> None:
        """Examine all chips and links if a loss is no number."""
        value = self._parallel.local(loss)
        if value is not None and not math.isfinite(float(value)):
            why = f"the loss of step {step} is {float(value)}"
            self.examine(why)
            raise TrainingError(
                f"{why}, and all chips are well: try a lower learning rate or a longer warm-up, or "
                "go back to a checkpoint before it"
            )

    def compare(self, step: int, state: State) -> None:
        """See whether all chips have the same parameters."""
        if self._topology.devices and self._topology.num_live > 1:
            sick = check_equal(state.params, self._topology, cluster=self._parallel.cluster)
            if sick:
                self._differ(step, sick)

    def examine(self, why: str) -> None:
        """Look at all chips and links; go on without those that are found to be sick, if any."""
        cluster = self._parallel.cluster
        cluster.at("examine")
        findings = examine(self._topology, cluster=cluster, limit=EXAMINE)
        if not findings.masked:
            return
        found = "; ".join(str(one) for one in findings.found)
        if cluster.line is None:
            raise TrainingError(f"{why}, and {found}: give --failed {findings.failed}")
        cluster.line.mask(format_failed(findings.masked), f"{why}; {found}")

    def _differ(self, step: int, sick: tuple[Any, ...]) -> None:
        cluster = self._parallel.cluster
        if len(sick) * 2 >= self._topology.num_live:
            raise TrainingError(
                f"after step {step} no two halves of the chips have the same parameters: ftmesh "
                "doctor may find out why; go back to a checkpoint"
            )
        blocks = format_failed(sick)
        why = f"after step {step} its parameters are not those of the other chips"
        if cluster.line is None:
            raise TrainingError(f"chips {blocks}: {why}; give --failed {blocks}")
        cluster.line.mask(blocks, why)


def with_faults(step: int, state: State) -> State:
    """The state as it is, but where a wrong gradient is planted in the first chip here."""
    if not fault_injection.wrong(step):
        return state
    sick = jax.local_devices()[0]

    def spoiled(leaf: jax.Array) -> jax.Array:
        parts = [
            jax.device_put(np.asarray(shard.data) * 1.001, sick)
            if shard.device == sick
            else shard.data
            for shard in leaf.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return state._replace(params=jax.tree.map(spoiled, state.params))
