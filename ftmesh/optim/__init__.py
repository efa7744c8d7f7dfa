"""Optim: optimizers whose state is shared out among the chips. Needs optax."""
