"""Finds unhealthy chips and links: by probing them, or by comparing replicas."""

from ftmesh.health.doctor import examine as examine
from ftmesh.health.examination import Findings as Findings
from ftmesh.health.replica_check import check_replicas as check_replicas
