"""Checkpoints: each process writes what it owns, and any other mesh can restore them."""

from ftmesh.checkpoint.checkpoints import Checkpoints as Checkpoints
from ftmesh.checkpoint.restore import read_tensors as read_tensors
