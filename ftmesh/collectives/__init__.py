"""Collectives: lax's four on a plan, their halves, sums over groups, and means of gradients."""

from ftmesh.collectives.all_reduce import BUCKET_BYTES as BUCKET_BYTES
from ftmesh.collectives.all_reduce import pmean as pmean
from ftmesh.collectives.all_reduce import psum as psum
from ftmesh.collectives.reduce_scatter import all_gather as all_gather
from ftmesh.collectives.reduce_scatter import gather_from_owners as gather_from_owners
from ftmesh.collectives.reduce_scatter import psum_scatter as psum_scatter
from ftmesh.collectives.reduce_scatter import reduce_to_owners as reduce_to_owners
from ftmesh.collectives.value_and_grad import value_and_grad as value_and_grad
