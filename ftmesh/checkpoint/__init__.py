"""Checkpoints: each process writes what it owns; any other mesh can restore it."""

from ftmesh.checkpoint.checkpoints import Checkpoints as Checkpoints
