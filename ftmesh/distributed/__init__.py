"""The processes of a run: how they start, what they agree on and how they exit together."""

from typing import TYPE_CHECKING

from ftmesh.optional_deps import lazy_attributes

if TYPE_CHECKING:
    from ftmesh.distributed.consensus import agree_on_mesh as agree_on_mesh
    from ftmesh.distributed.consensus import agreed_plan as agreed_plan
    from ftmesh.distributed.process_group import ProcessGroup as ProcessGroup
    from ftmesh.distributed.startup import initialize as initialize
else:  # engines are found without JAX
    __getattr__ = lazy_attributes(
        __name__,
        {
            "ProcessGroup": "ftmesh.distributed.process_group",
            "agree_on_mesh": "ftmesh.distributed.consensus",
            "agreed_plan": "ftmesh.distributed.consensus",
            "initialize": "ftmesh.distributed.startup",
        },
    )
