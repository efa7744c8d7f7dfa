"""Epochs: what a process does is begun anew when who takes part has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax

from ftmesh.distributed.process_group import Cluster
from ftmesh.elastic.controller_client import EpochOver
from ftmesh.errors import CheckpointError, ClusterError, PlanError, TrainingError

T = TypeVar("T")


def through_epochs(cluster: Cluster, body: Callable[[Cluster], T]) -> T:
    """What `body` gives, of the cluster as it is; done again, with who is left, in every epoch.

    A collective that fails is told to the steward, which finds out whose fault that is. Where there
    is no plan for what is left, all are started anew: lost hosts may come back, and nobody failed.
    A run that cannot go on for what it computes is ended.
    """
    while True:
        try:
            return body(cluster)
        except EpochOver:
            pass
        except PlanError as error:
            if cluster.line is None or cluster.epoch == cluster.line.start:
                raise
            cluster.line.restart(f"no plan for what is left: {error}")
        except TrainingError as error:
            if cluster.line is None:
                raise
            cluster.line.end(str(error))
        except (ClusterError, CheckpointError) as error:
            if cluster.line is None or cluster.epoch == 1:
                raise
            cluster.line.restart(str(error))
        except jax.errors.JaxRuntimeError as error:
            if cluster.line is None:
                raise
            with contextlib.suppress(EpochOver):
                cluster.line.failed(error)
        cluster = cluster.in_next_epoch()
