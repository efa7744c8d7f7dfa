"""ftmesh: collectives that keep data-parallel JAX training running on a mesh with failed chips.

topo = ftmesh.Topology.grid("16x32", failed="4x2@6,14")
plan = ftmesh.plan(topo, "row_pair")
print(plan)                              # what it does, a line per phase
ftmesh.save(plan.schedule, "plan.npz")   # plain integer columns
"""

from ftmesh.errors import FtmeshError as FtmeshError
from ftmesh.errors import PlanError as PlanError
from ftmesh.errors import RoutingError as RoutingError
from ftmesh.errors import ScheduleError as ScheduleError
from ftmesh.errors import ScheduleFileError as ScheduleFileError
from ftmesh.errors import TopologyError as TopologyError
from ftmesh.errors import TopologyWarning as TopologyWarning
from ftmesh.errors import VerificationError as VerificationError
from ftmesh.notation import Block as Block
from ftmesh.notation import Coord as Coord
from ftmesh.plan import Plan as Plan
from ftmesh.plan import plan as plan
from ftmesh.schedule import Phase as Phase
from ftmesh.schedule import Schedule as Schedule
from ftmesh.serialize import load as load
from ftmesh.serialize import save as save
from ftmesh.topology import Topology as Topology
from ftmesh.verify import Proof as Proof
from ftmesh.verify import verify as verify

__version__ = "0.1.0"
