"""Flax layers whose batch statistics are taken over groups of neighbouring chips. Needs Flax."""

from ftmesh.optional_deps import require

require("ftmesh.nn", "nn", "flax")

from ftmesh.collectives.all_reduce import ChipGroups as ChipGroups  # noqa: E402
from ftmesh.nn.batch_norm import GroupBatchNorm as GroupBatchNorm  # noqa: E402
from ftmesh.nn.batch_norm import NnxGroupBatchNorm as NnxGroupBatchNorm  # noqa: E402
from ftmesh.nn.batch_norm import mean_batch_stats as mean_batch_stats  # noqa: E402
