"""The processes of a pod: who is there, what all of them agree on, and how they end together."""

from ftmesh.cluster.agreed import agree_on_mesh as agree_on_mesh
from ftmesh.cluster.agreed import agreed_plan as agreed_plan
from ftmesh.cluster.cluster import Cluster as Cluster
from ftmesh.cluster.doctor import examine as examine
from ftmesh.cluster.equal import check_equal as check_equal
from ftmesh.cluster.findings import Findings as Findings
from ftmesh.cluster.joining import join as join
