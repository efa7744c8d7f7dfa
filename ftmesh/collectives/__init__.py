"""Collectives: lax's four on a plan, their halves, sums over groups, and means of gradients."""

from ftmesh.collectives.blocks import all_gather as all_gather
from ftmesh.collectives.blocks import psum_scatter as psum_scatter
from ftmesh.collectives.losses import value_and_grad as value_and_grad
from ftmesh.collectives.owners import gather_from_owners as gather_from_owners
from ftmesh.collectives.owners import reduce_to_owners as reduce_to_owners
from ftmesh.collectives.sums import BUCKET_BYTES as BUCKET_BYTES
from ftmesh.collectives.sums import pmean as pmean
from ftmesh.collectives.sums import psum as psum
