"""Training on a plan: gradients, a sharded optimizer, batches, batch norms, checkpoints, a loop.

Needs what ``pip install ftmesh[train]`` brings. Each name is described in its own module.
"""

from typing import TYPE_CHECKING

from ftmesh.checkpoint.checkpoints import Checkpoints as Checkpoints
from ftmesh.collectives.gradients import Means as Means
from ftmesh.collectives.gradients import accumulated as accumulated
from ftmesh.collectives.gradients import backward_order as backward_order
from ftmesh.collectives.gradients import mean_gradients as mean_gradients
from ftmesh.collectives.gradients import plan_for as plan_for
from ftmesh.collectives.gradients import with_mean_gradients as with_mean_gradients
from ftmesh.collectives.group_sum import Groups as Groups
from ftmesh.layout.batch_shares import Shares as Shares
from ftmesh.layout.batch_shares import weighted_sum as weighted_sum
from ftmesh.optim.elementwise.trace import NotShardableError as NotShardableError
from ftmesh.optim.lars_lamb import clip_by_global_norm as clip_by_global_norm
from ftmesh.optim.lars_lamb import lamb as lamb
from ftmesh.optim.lars_lamb import lars as lars
from ftmesh.optim.lars_lamb import matrices as matrices
from ftmesh.optim.replicated import WholeOptimizer as WholeOptimizer
from ftmesh.optim.sharded import ShardedOptimizer as ShardedOptimizer
from ftmesh.optim.state import ShardedState as ShardedState
from ftmesh.optional_deps import later, require
from ftmesh.train.parallel import Parallel as Parallel

if TYPE_CHECKING:
    from ftmesh.nn.batch_norm import GroupBatchNorm as GroupBatchNorm
    from ftmesh.nn.batch_norm import NnxGroupBatchNorm as NnxGroupBatchNorm
    from ftmesh.nn.batch_norm import group_statistics as group_statistics
    from ftmesh.nn.batch_norm import mean_statistics as mean_statistics

# These import Flax, so they are loaded when they are first asked for.
_WITH_FLAX = {
    "GroupBatchNorm": "ftmesh.nn.batch_norm",
    "group_statistics": "ftmesh.nn.batch_norm",
    "mean_statistics": "ftmesh.nn.batch_norm",
    "NnxGroupBatchNorm": "ftmesh.nn.batch_norm",
}


__all__ = [
    "Checkpoints",
    "GroupBatchNorm",
    "Groups",
    "Means",
    "NnxGroupBatchNorm",
    "NotShardableError",
    "Parallel",
    "ShardedOptimizer",
    "ShardedState",
    "Shares",
    "WholeOptimizer",
    "accumulated",
    "backward_order",
    "clip_by_global_norm",
    "group_statistics",
    "lamb",
    "lars",
    "matrices",
    "mean_gradients",
    "mean_statistics",
    "plan_for",
    "weighted_sum",
    "with_mean_gradients",
]

if not TYPE_CHECKING:  # to type checkers, a name that does not exist is an error
    __getattr__ = later(__name__, _WITH_FLAX)


require("ftmesh.train", "train", "flax", "google.protobuf", "google_crc32c", "grain", "rich")
