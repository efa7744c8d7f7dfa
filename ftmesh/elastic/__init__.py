"""Training that survives lost hosts: workers, a controller, and checkpoints in host memory.

``ftmesh launch --failures N -- COMMAND`` runs a command under a controller. In the command,
`initialize` connects to it and `run_generations` calls the training again after each failure.
"""

from typing import TYPE_CHECKING

from ftmesh.optional_deps import lazy_attributes

if TYPE_CHECKING:
    from ftmesh.elastic.controller_client import GenerationChanged as GenerationChanged
    from ftmesh.elastic.controller_client import Paused as Paused
    from ftmesh.elastic.elastic_group import ElasticGroup as ElasticGroup
    from ftmesh.elastic.elastic_group import initialize as initialize
    from ftmesh.elastic.elastic_group import run_generations as run_generations
    from ftmesh.elastic.local_pod import run_pod as run_pod
    from ftmesh.elastic.peer_checkpoint import PeerCheckpoint as PeerCheckpoint
    from ftmesh.elastic.supervisor import Policy as Policy
    from ftmesh.elastic.supervisor import Supervisor as Supervisor
else:  # the programs in this package must start without JAX
    __getattr__ = lazy_attributes(
        __name__,
        {
            "ElasticGroup": "ftmesh.elastic.elastic_group",
            "GenerationChanged": "ftmesh.elastic.controller_client",
            "Paused": "ftmesh.elastic.controller_client",
            "PeerCheckpoint": "ftmesh.elastic.peer_checkpoint",
            "Policy": "ftmesh.elastic.supervisor",
            "Supervisor": "ftmesh.elastic.supervisor",
            "initialize": "ftmesh.elastic.elastic_group",
            "run_generations": "ftmesh.elastic.elastic_group",
            "run_pod": "ftmesh.elastic.local_pod",
        },
    )
