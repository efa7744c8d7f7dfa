"""The processes of a run: how they start, what they agree on and how they exit together."""

from ftmesh.distributed.consensus import agree_on_mesh as agree_on_mesh
from ftmesh.distributed.consensus import agreed_plan as agreed_plan
from ftmesh.distributed.process_group import ProcessGroup as ProcessGroup
from ftmesh.distributed.startup import initialize as initialize
