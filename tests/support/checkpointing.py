"""Saves, damages and restores checkpoints of small states."""

import jax.numpy as jnp

from ftmesh.checkpoint.checkpoints import Checkpoints


def small_state(scale=1.0, width=3):
    return {"params": {"w": scale * jnp.arange(float(width)), "b": jnp.zeros(2, jnp.bfloat16)}}


def saved_steps(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def save_steps(folder, *numbers, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in numbers:
            checkpoints.save(step, small_state(float(step)))


def restore(folder, like=None):
    """Return the step, the state, and the lines that are logged."""
    lines = []
    with Checkpoints(folder, resume=True, log=lines.append) as checkpoints:
        step, state = checkpoints.restore(like or small_state(0.0))
    return step, state, lines


def flip_bit(path, position=3):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 16
    path.write_bytes(raw)
