"""The processes of a pod: who is there, what all of them agree on, and how they end together."""

from ftmesh.distributed.consensus import agree_on_mesh as agree_on_mesh
from ftmesh.distributed.consensus import agreed_plan as agreed_plan
from ftmesh.distributed.initialize import join as join
from ftmesh.distributed.process_group import Cluster as Cluster
