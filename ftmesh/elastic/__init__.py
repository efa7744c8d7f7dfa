"""Training that survives lost hosts: workers, a controller, and checkpoints in host memory.

``ftmesh launch --failures N -- COMMAND`` runs a command under a controller. In the command,
`attempts` runs a training loop again after each failure, from where it was.
"""

from typing import TYPE_CHECKING

from ftmesh.optional_deps import lazy_attributes

if TYPE_CHECKING:
    from ftmesh.elastic.attempt import Attempt as Attempt
    from ftmesh.elastic.attempt import attempts as attempts
    from ftmesh.elastic.elastic_group import ElasticGroup as ElasticGroup
    from ftmesh.elastic.elastic_group import initialize as initialize
    from ftmesh.elastic.local_pod import run_pod as run_pod
    from ftmesh.elastic.step_sampler import StepSampler as StepSampler
else:  # the programs in this package must start without JAX
    __getattr__ = lazy_attributes(
        __name__,
        {
            "Attempt": "ftmesh.elastic.attempt",
            "ElasticGroup": "ftmesh.elastic.elastic_group",
            "StepSampler": "ftmesh.elastic.step_sampler",
            "attempts": "ftmesh.elastic.attempt",
            "initialize": "ftmesh.elastic.elastic_group",
            "run_pod": "ftmesh.elastic.local_pod",
        },
    )
