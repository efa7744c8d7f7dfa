"""Optim: optimizers whose state is shared out among the chips. Needs optax."""

from ftmesh.optional_deps import require

require("ftmesh.optim", "train", "optax")
