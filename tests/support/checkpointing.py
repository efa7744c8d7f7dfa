"""Small states, checkpoints of them, and faults to plant in those."""

import jax.numpy as jnp

from ftmesh.checkpoint.checkpoints import Checkpoints


def state(scale=1.0, width=3):
    return {"params": {"w": scale * jnp.arange(float(width)), "b": jnp.zeros(2, jnp.bfloat16)}}


def steps(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def saved(folder, *numbers, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in numbers:
            checkpoints.save(step, state(float(step)))


def restored(folder, like=None):
    """The step, the state, and the lines that are said."""
    lines = []
    with Checkpoints(folder, resume=True, say=lines.append) as checkpoints:
        step, found = checkpoints.restore(like or state(0.0))
    return step, found, lines


def flip(path, at=3):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 16
    path.write_bytes(raw)
