"""Detect silent data corruption: a loss that is not finite, or parameters that differ by chip.

Checks run before a step is committed. Unhealthy chips are quarantined, and the run continues
without them from the last committed step.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from examples.common.trainer import State, Trainer
from ftmesh.errors import TrainingError
from ftmesh.health.doctor import examine
from ftmesh.health.replica_check import check_replicas
from ftmesh.testing import fault_injection
from ftmesh.topology.notation import format_failed

EXAMINE_TIMEOUT = 120.0  # seconds for every chip and link to answer


class SdcCheck:
    """Checks the results of steps and quarantines unhealthy chips."""

    def __init__(self, trainer: Trainer) -> None:
        self._parallel = trainer.parallel
        self._topology = trainer.parallel.ranks.topology

    def check_loss(self, step: int, loss: Any) -> None:
        """Examine all chips and links if the loss is not finite; raise if all are healthy."""
        value = self._parallel.local(loss)
        if value is not None and not math.isfinite(float(value)):
            why = f"the loss of step {step} is {float(value)}"
            self.examine(why)
            raise TrainingError(
                f"{why}, and all chips are healthy: try a lower learning rate, a longer warm-up, "
                "or an earlier checkpoint"
            )

    def compare(self, step: int, state: State) -> None:
        """Quarantine chips whose parameters differ from those of the majority."""
        if self._topology.devices and self._topology.num_live > 1:
            unhealthy = check_replicas(state.params, self._topology, group=self._parallel.group)
            if unhealthy:
                self._quarantine(step, unhealthy)

    def examine(self, why: str) -> None:
        """Test all chips and links, and quarantine the unhealthy ones."""
        group = self._parallel.group
        group.report_phase("examine")
        findings = examine(self._topology, group=group, timeout=EXAMINE_TIMEOUT)
        if not findings.quarantined:
            return
        entries = "; ".join(map(str, findings.entries))
        if group.controller is None:
            raise TrainingError(f"{why}, and {entries}: give --failed {findings.failed}")
        group.controller.quarantine(format_failed(findings.quarantined), f"{why}; {entries}")

    def _quarantine(self, step: int, unhealthy: tuple[Any, ...]) -> None:
        group = self._parallel.group
        if len(unhealthy) * 2 >= self._topology.num_live:
            raise TrainingError(
                f"after step {step} no majority of the chips has the same parameters: go back to a "
                "checkpoint; ftmesh doctor may find the cause"
            )
        blocks = format_failed(unhealthy)
        why = f"its parameters differ from those of the other chips after step {step}"
        if group.controller is None:
            raise TrainingError(f"chips {blocks}: {why}; give --failed {blocks}")
        group.controller.quarantine(blocks, why)


def apply_faults(step: int, state: State) -> State:
    """Corrupt the parameters on this process's first chip if fault injection asks for it."""
    if not fault_injection.corrupts_gradient(step):
        return state
    unhealthy = jax.local_devices()[0]

    def corrupt(leaf: jax.Array) -> jax.Array:
        shards = [
            jax.device_put(np.asarray(shard.data) * 1.001, unhealthy)
            if shard.device == unhealthy
            else shard.data
            for shard in leaf.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return state._replace(params=jax.tree.map(corrupt, state.params))
