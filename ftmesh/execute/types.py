"""Types that the signatures of collectives and optimizers share. Needs no JAX."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeAlias

from numpy.typing import DTypeLike as DTypeLike

from ftmesh.execute.lowering import Program
from ftmesh.topology.ranks import HasTopology

AxisName: TypeAlias = Hashable
PyTree: TypeAlias = Any
Specs: TypeAlias = Any  # a PartitionSpec or NamedSharding, or a pytree of them; None: not given


class PlanLike(HasTopology, Protocol):
    """What collectives and optimizers need of a plan; `ftmesh.Plan` has it."""

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, for errors."""

    @property
    def executor(self) -> str:
        """The name of the executor, such as ``ppermute``."""

    @property
    def program(self) -> Program:
        """The schedule as an executor runs it."""

    @property
    def with_reduce_scatter(self) -> PlanLike:
        """The plan itself, or an equivalent one whose schedule has a reduce-scatter phase."""

    @property
    def unrolled_variant(self) -> PlanLike:
        """An equivalent plan whose rounds are unrolled, so that other work can overlap them."""

    def for_payload(self, num_bytes: int, *, wire_dtype: str | None = None) -> PlanLike:
        """The plan to use for a payload of this size and dtype."""

    def jax_mesh(self, axis_name: str | Sequence[str]) -> Any:
        """The ``jax.sharding.Mesh`` whose axis the collectives run along."""
