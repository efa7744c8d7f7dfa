"""ftmesh: collectives that keep data-parallel JAX training running on a mesh with failed chips.

topo = ftmesh.Topology.grid("16x32", failed="4x2@6,14")
plan = ftmesh.plan(topo, "row_pair")
print(plan)                              # what it does, a line per phase
ftmesh.save(plan.schedule, "plan.npz")   # plain integer columns
"""

from typing import TYPE_CHECKING

from ftmesh.cost.links import Network as Network
from ftmesh.cost.lower_bounds import Limits as Limits
from ftmesh.cost.lower_bounds import limits as limits
from ftmesh.cost.simulate import Simulation as Simulation
from ftmesh.cost.simulate import simulate as simulate
from ftmesh.errors import ArgumentError as ArgumentError
from ftmesh.errors import BatchSizeWarning as BatchSizeWarning
from ftmesh.errors import CollectiveError as CollectiveError
from ftmesh.errors import FtmeshError as FtmeshError
from ftmesh.errors import PlanError as PlanError
from ftmesh.errors import RoutingError as RoutingError
from ftmesh.errors import ScheduleError as ScheduleError
from ftmesh.errors import ScheduleFileError as ScheduleFileError
from ftmesh.errors import TopologyError as TopologyError
from ftmesh.errors import TopologyWarning as TopologyWarning
from ftmesh.errors import VerificationError as VerificationError
from ftmesh.optional_deps import lazy_attributes
from ftmesh.planning.make_plan import plan as plan
from ftmesh.planning.plan import Plan as Plan
from ftmesh.schedule.files import load as load
from ftmesh.schedule.files import save as save
from ftmesh.schedule.phase import Phase as Phase
from ftmesh.schedule.schedule import Schedule as Schedule
from ftmesh.schedule.schedule import SplitSchedule as SplitSchedule
from ftmesh.schedule.verify import Proof as Proof
from ftmesh.schedule.verify import verify as verify
from ftmesh.topology.notation import Block as Block
from ftmesh.topology.notation import Coord as Coord
from ftmesh.topology.ranks import jax_mesh as jax_mesh
from ftmesh.topology.ring_order import RingOrder as RingOrder
from ftmesh.topology.ring_order import ring_order as ring_order
from ftmesh.topology.tiles import TiledTopology as TiledTopology
from ftmesh.topology.topology import Topology as Topology

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ftmesh.collectives import all_gather as all_gather
    from ftmesh.collectives import pmean as pmean
    from ftmesh.collectives import psum as psum
    from ftmesh.collectives import psum_scatter as psum_scatter
    from ftmesh.collectives.audit import audit as audit
    from ftmesh.layout.batch_shares import batch_padding as batch_padding
    from ftmesh.layout.batch_shares import nearest_batch_size as nearest_batch_size
    from ftmesh.layout.batch_shares import pad_batch as pad_batch
    from ftmesh.tpu.compiler import compiler_options as compiler_options

# These import JAX, so they are loaded when they are first asked for.
_WITH_JAX = {
    "all_gather": "ftmesh.collectives",
    "audit": "ftmesh.collectives.audit",
    "batch_padding": "ftmesh.layout.batch_shares",
    "compiler_options": "ftmesh.tpu.compiler",
    "nearest_batch_size": "ftmesh.layout.batch_shares",
    "pad_batch": "ftmesh.layout.batch_shares",
    "pmean": "ftmesh.collectives",
    "psum": "ftmesh.collectives",
    "psum_scatter": "ftmesh.collectives",
}

__all__ = [
    "ArgumentError",
    "BatchSizeWarning",
    "Block",
    "CollectiveError",
    "Coord",
    "FtmeshError",
    "Limits",
    "Network",
    "Phase",
    "Plan",
    "PlanError",
    "Proof",
    "RingOrder",
    "RoutingError",
    "Schedule",
    "ScheduleError",
    "ScheduleFileError",
    "Simulation",
    "SplitSchedule",
    "TiledTopology",
    "Topology",
    "TopologyError",
    "TopologyWarning",
    "VerificationError",
    "all_gather",
    "audit",
    "batch_padding",
    "compiler_options",
    "jax_mesh",
    "limits",
    "load",
    "nearest_batch_size",
    "pad_batch",
    "plan",
    "pmean",
    "psum",
    "psum_scatter",
    "ring_order",
    "save",
    "simulate",
    "verify",
]

if not TYPE_CHECKING:  # to type checkers, a name that does not exist is an error
    __getattr__ = lazy_attributes(__name__, _WITH_JAX)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
