"""Optax transformations whose state is sharded over the chips of a plan. Needs optax."""

from ftmesh.optional_deps import require

require("ftmesh.optim", "optim", "optax")

from ftmesh.optim.op_graph import NotShardableError as NotShardableError  # noqa: E402
from ftmesh.optim.optimizers import ReplicatedOptimizer as ReplicatedOptimizer  # noqa: E402
from ftmesh.optim.optimizers import clip_by_global_norm as clip_by_global_norm  # noqa: E402
from ftmesh.optim.optimizers import lamb as lamb  # noqa: E402
from ftmesh.optim.optimizers import lars as lars  # noqa: E402
from ftmesh.optim.optimizers import matrix_mask as matrix_mask  # noqa: E402
from ftmesh.optim.sharded import ShardedOptimizer as ShardedOptimizer  # noqa: E402
