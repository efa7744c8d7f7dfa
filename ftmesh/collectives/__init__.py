"""Collectives as in `jax.lax`, on a plan; gradients over all ranks; groups of chips."""

from ftmesh.collectives.all_reduce import BUCKET_BYTES as BUCKET_BYTES
from ftmesh.collectives.all_reduce import pmean as pmean
from ftmesh.collectives.all_reduce import psum as psum
from ftmesh.collectives.exchange import all_to_all as all_to_all
from ftmesh.collectives.exchange import pmax as pmax
from ftmesh.collectives.exchange import pmin as pmin
from ftmesh.collectives.exchange import ppermute as ppermute
from ftmesh.collectives.gradients import ReducedGradients as ReducedGradients
from ftmesh.collectives.gradients import accumulate_gradients as accumulate_gradients
from ftmesh.collectives.gradients import backward_order as backward_order
from ftmesh.collectives.gradients import with_mean_gradients as with_mean_gradients
from ftmesh.collectives.reduce_scatter import all_gather as all_gather
from ftmesh.collectives.reduce_scatter import psum_scatter as psum_scatter
from ftmesh.layout.batch_shares import BatchShares as BatchShares
from ftmesh.layout.batch_shares import weighted_sum as weighted_sum
