"""Training that survives lost hosts: workers, a controller, and checkpoints in host memory.

``ftmesh launch --failures N -- COMMAND`` runs a command under a controller. In the command,
`initialize` joins it and `run_generations` calls the training again after each failure.
"""

from ftmesh.elastic.controller_client import GenerationChanged as GenerationChanged
from ftmesh.elastic.controller_client import Paused as Paused
from ftmesh.elastic.elastic_group import ElasticGroup as ElasticGroup
from ftmesh.elastic.elastic_group import initialize as initialize
from ftmesh.elastic.elastic_group import run_generations as run_generations
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint as PeerCheckpoint
