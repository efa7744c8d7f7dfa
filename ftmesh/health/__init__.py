"""Which chips and links are sick: examined, or found by what must be equal and is not."""

from ftmesh.health.doctor import examine as examine
from ftmesh.health.findings import Findings as Findings
from ftmesh.health.replica_check import check_equal as check_equal
