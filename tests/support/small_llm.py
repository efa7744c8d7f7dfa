"""Small language models, and a mesh of one device to compare others with."""

from dataclasses import replace

import jax

import ftmesh
from examples.llm.config import PRESETS
from examples.llm.sharding import make_mesh

TINY = PRESETS["tiny"]
SMALL = replace(TINY, num_layers=2, length=32, batch=20, steps=4, warmup=1, remat="none")


def one_device():
    topology = ftmesh.Topology.from_devices(jax.devices()[:1], shape="1x1")
    return make_mesh(topology, "1x1")
