"""With a plan, the audit judges XLA's own collectives: order, cost and rounding."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Network, Topology
from ftmesh.testing import cpu_grid
from ftmesh.topology.ring_order import ring_order

X = np.ones((12, 12), np.float32)
ORDER = "make the mesh by plan.jax_mesh('data')"


@pytest.fixture(scope="module")
def topology():
    """Twelve chips around a hole in the middle: they have one circuit."""
    return cpu_grid("4x4", failed="2x2@1,1")


def mesh_of(topology, coords, names=("data",), shape=(-1,)):
    """A mesh of one device for each chip, in the order of `coords`."""
    device_of = dict(zip(topology.all_coords(), topology.all_devices, strict=True))
    return Mesh(np.array([device_of[coord] for coord in coords]).reshape(shape), names)


def ring_mesh(topology):
    return ftmesh.jax_mesh(topology, "data")


def compiled(mesh, body, x=X):
    run = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return jax.jit(run).lower(x).compile()


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    (at,) = [start + i for i, line in enumerate(lines) if text in line]
    return f"{Path(__file__)}:{at}"


def a_sum(x):
    return lax.psum(x, "data")


def a_scatter(x):
    return lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)


def a_gather(x):
    return lax.all_gather(x, "data", axis=1, tiled=True)


def a_shift(x):
    return lax.ppermute(x, "data", [(i, (i + 1) % 12) for i in range(12)])


SLOW = Network(1e6, 1e-3)  # bytes count


@pytest.mark.parametrize(
    ("body", "kind", "num_bytes", "seconds"),
    [
        (a_sum, "all-reduce", 48, 22 * (0.5e-3 + 48 / 12 / 2 / 1e6)),
        (a_scatter, "reduce-scatter", 48, 22 * (0.5e-3 + 48 / 12 / 2 / 1e6)),  # an all-reduce there
        (a_gather, "all-gather", 576, 11 * (0.5e-3 + 576 / 12 / 2 / 1e6)),
        (a_shift, "collective-permute", 48, 1e-3 + 48 / 1e6),
    ],
)
def test_along_the_ring_is_good_and_costed(topology, body, kind, num_bytes, seconds):
    plan = ftmesh.plan(topology, link=SLOW)
    audit = ftmesh.audit(compiled(ring_mesh(topology), body), "data", plan=plan)
    audit.require_none()
    assert not audit
    (entry,) = audit.native
    assert (entry.kind, entry.num_bytes) == (kind, num_bytes)
    assert entry.seconds == pytest.approx(seconds)
    assert entry.sources == (line_of(body, "lax."),)


def test_report(topology):
    audit = ftmesh.audit(compiled(ring_mesh(topology), a_sum), "data", plan=topology)
    assert str(audit).splitlines() == [
        "all collectives along 'data' follow the plan",
        "1 collective goes around the ring: 48 B in 5.5 us if each runs once, on links of 50 GB/s "
        "each way, 0.5 us a hop",
        f"  all-reduce of 48 B along data, 5.5 us, from {line_of(a_sum, 'lax.')}",
        "    jit(a_sum)/shard_map/psum",
    ]


def test_a_jit_loop_on_the_ring(topology):
    """Replicated parameters, and parameters cut along the axis, which are gathered."""
    mesh = ring_mesh(topology)
    batch = jax.device_put(np.ones((24, 12), np.float32), NamedSharding(mesh, P("data")))

    def loss(weights, batch):
        return jnp.mean(jnp.tanh(batch @ weights) ** 2)

    for spec in (P(), P("data")):
        sharding = NamedSharding(mesh, spec)
        weights = jax.device_put(np.ones((12, 12), np.float32), sharding)
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, sharding))
        audit = ftmesh.audit(step.lower(weights, batch), "data", plan=topology)
        audit.require_none()
        kinds = {entry.kind for entry in audit.native}
        assert "all-reduce" in kinds
        assert ("all-gather" in kinds) == (spec == P("data"))
        with pytest.raises(CollectiveError):  # without a plan, nothing of XLA's is known as good
            ftmesh.audit(step.lower(weights, batch), "data").require_none()


# Planted orders ---------------------------------------------------------------------------------


def swapped(coords, i, j):
    coords = list(coords)
    coords[i], coords[j] = coords[j], coords[i]
    return coords


def problem_of(topology, mesh, body=a_sum, x=X):
    (entry,) = ftmesh.audit(compiled(mesh, body, x), "data", plan=topology)
    assert (entry.seconds is not None) == ("longer than a hop" in entry.problem)
    assert entry.sources == (line_of(body, "lax."),)
    return entry


@pytest.mark.parametrize("body", [a_sum, a_scatter, a_gather])
def test_order_of_rows_is_found(topology, body):
    rows = [coord for coord in topology.all_coords() if topology.is_live(coord)]
    entry = problem_of(topology, mesh_of(topology, rows), body)
    assert entry.problem == (
        "its step from chip (0, 1) to (3, 1) crosses failed chips or links, and 4 more do"
    )
    assert entry.advice.startswith(ORDER)


def test_one_swap_is_found():
    """On a whole mesh, where no route is blocked; but sums go over all axes, in any order."""
    whole = cpu_grid("4x4")
    coords = ring_order(whole).coords
    x = np.ones((16, 16), np.float32)
    good = ftmesh.audit(compiled(mesh_of(whole, coords), a_gather, x), "data", plan=whole)
    assert len(good.native) == 1
    for i in range(15):
        mesh = mesh_of(whole, swapped(coords, i, i + 1))
        entry = problem_of(whole, mesh, a_gather, x)
        assert entry.problem.startswith("2 of its 16 steps are longer than a hop, the longest ")
        assert entry.seconds > good.native[0].seconds
    assert not ftmesh.audit(compiled(mesh, a_sum, x), "data", plan=whole)


def test_sums_over_failed_links_are_found():
    """With all chips in the mesh XLA goes over all axes, whatever the order."""
    cut = cpu_grid("4x4", failed_links="0,0-1,0")
    mesh = mesh_of(cut, ring_order(cut).coords)
    entry = problem_of(cut, mesh, x=np.ones((16, 16), np.float32))
    assert entry.problem == "it goes over all axes, also over failed links"
    assert entry.advice.startswith("mark a chip at each failed link as failed")


def test_rotated_and_reversed_rings_are_good(topology):
    coords = ring_order(topology).coords
    for order in (coords[5:] + coords[:5], coords[::-1]):
        assert not ftmesh.audit(compiled(mesh_of(topology, order), a_sum), "data", plan=topology)


def test_failed_chips_in_the_mesh_are_found(topology):
    entry = problem_of(
        topology, mesh_of(topology, topology.all_coords()), x=np.ones((16, 16), np.float32)
    )
    assert entry.problem == "it takes part on failed chips, such as (1, 1)"


def test_failed_link_on_the_way_is_found():
    topology = cpu_grid("4x4", failed_links="1,0-2,0")
    whole = ring_order(cpu_grid("4x4")).coords
    steps = {frozenset(step) for step in zip(whole, whole[1:] + whole[:1], strict=True)}
    assert frozenset({(1, 0), (2, 0)}) in steps
    x = np.ones((16, 16), np.float32)
    entry = problem_of(topology, mesh_of(topology, whole), a_gather, x)
    assert "crosses failed chips or links" in entry.problem


def test_a_ring_with_a_step_of_two_hops_is_good_if_there_is_none_without():
    """Fifteen chips: hops alternate between two colours, so no circuit visits each once."""
    odd = cpu_grid("4x4", failed="1x1@3,3")
    coords = ring_order(odd).coords
    assert sorted(ring_order(odd).hops)[-2:] == [1, 2]
    x = np.ones((15, 15), np.float32)
    audit = ftmesh.audit(compiled(mesh_of(odd, coords), a_sum, x), "data", plan=odd)
    audit.require_none()
    assert len(audit.native) == 1
    longer = [
        ftmesh.audit(compiled(mesh_of(odd, swapped(coords, i, i + 1)), a_sum, x), "data", plan=odd)
        for i in range(14)
    ]
    assert all(longer)

    def shift(x):
        return lax.ppermute(x, "data", [(i, (i + 1) % 15) for i in range(15)])

    assert not ftmesh.audit(compiled(mesh_of(odd, coords), shift, x), "data", plan=odd)


def test_permutations_and_exchanges(topology):
    mesh = ring_mesh(topology)

    across = tuple(map(ring_order(topology).coords.index, [(1, 0), (1, 3)]))

    def far(x):
        return lax.ppermute(x, "data", [across])

    entry = problem_of(topology, mesh, far)
    assert entry.problem == "its step from chip (1, 0) to (1, 3) crosses failed chips or links"
    assert entry.advice.startswith("call plan.ppermute, or permute between neighbours")

    def two_on(x):
        return lax.ppermute(x, "data", [(0, 2), (3, 4)])

    entry = problem_of(topology, mesh, two_on)
    assert entry.problem == "1 of its 2 steps is longer than a hop, 2 hops"

    def exchange(x):
        return lax.all_to_all(x, "data", 1, 1, tiled=True)

    entry = problem_of(topology, mesh, exchange)
    assert entry.advice.startswith("call plan.all_to_all")
    assert entry.problem == "it sends between all pairs of chips, also across failed ones"
    whole = Topology.from_devices(topology.all_devices[:12], shape="4x3")
    assert not ftmesh.audit(compiled(ring_mesh(whole), exchange), "data", plan=whole)


def test_embeddings_cut_along_their_features_are_exchanged(topology):
    """The compiler looks up a part of every row, and then exchanges parts for examples."""
    mesh = ring_mesh(topology)
    by_example = NamedSharding(mesh, P("data"))
    tokens = jax.device_put(np.zeros((24, 4), np.int32), by_example)

    def lookup(table, tokens):
        return lax.with_sharding_constraint(table[tokens], by_example).sum()

    def audit(spec):
        table = jax.device_put(np.ones((24, 24), np.float32), NamedSharding(mesh, spec))
        return ftmesh.audit(jax.jit(lookup).lower(table, tokens), "data", plan=topology)

    (entry,) = audit(P(None, "data"))
    assert entry.kind == "all-to-all"
    assert entry.sources == (line_of(lookup, "table[tokens]"),)
    assert entry.advice.startswith("the compiler moves an array from one sharding to another here")
    audit(P("data")).require_none()


def test_idle_chips_count_as_live(topology):
    plan = ftmesh.plan(topology, with_idle=True)
    for mesh in (plan.jax_mesh("data"), mesh_of(topology, ring_order(cpu_grid("4x4")).coords)):
        program = compiled(mesh, a_sum, np.ones((16, 16), np.float32))
        assert not ftmesh.audit(program, "data", plan=plan)
        assert ftmesh.audit(program, "data", plan=topology)


# Rounding ---------------------------------------------------------------------------------------


def sixteen_bits(kind, dtype, operation="add", num_ranks=12):
    """A program that reduces in few bits, as compilers for TPUs leave it."""
    groups = ",".join(map(str, range(num_ranks)))
    result = f"{dtype}[8]" if kind == "all-reduce" else f"{dtype}[1]"
    more = ", dimensions={0}" if kind == "reduce-scatter" else ""
    return f"""\
HloModule jit_step, num_partitions={num_ranks}

%region (a: {dtype}[], b: {dtype}[]) -> {dtype}[] {{
  %a = {dtype}[] parameter(0)
  %b = {dtype}[] parameter(1)
  ROOT %r = {dtype}[] {operation}(%a, %b)
}}

ENTRY %main (x: {dtype}[8]) -> {result} {{
  %x = {dtype}[8] parameter(0)
  ROOT %s = {result} {kind}(%x), channel_id=1, replica_groups={{{{{groups}}}}}, \
use_global_device_ids=true, to_apply=%region{more}, metadata={{op_name="jit(step)/sum" \
source_file="step.py" source_line=3}}
}}
"""


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
def test_sums_in_16_bits_over_many_ranks(topology, kind):
    mesh = ring_mesh(topology)
    (entry,) = ftmesh.audit(sixteen_bits(kind, "bf16"), "data", plan=topology, mesh=mesh)
    assert entry.problem == (
        "it adds 12 numbers in 16 bits: a sum in bfloat16 could be 4.3% off, 1% is the bound"
    )
    assert entry.advice.startswith("sum in float32: keep parameters in float32")
    assert entry.sources == ("step.py:3",)
    assert entry.seconds > 0
    for text in (
        sixteen_bits(kind, "f32"),
        sixteen_bits(kind, "s32"),
        sixteen_bits(kind, "bf16", "maximum"),
        sixteen_bits(kind, "f16"),  # 11 additions are 0.5 % off at most
    ):
        audit = ftmesh.audit(text, "data", plan=topology, mesh=mesh)
        audit.require_none()
        assert len(audit.native) == 1


def test_compiled_sum_in_16_bits_over_60_ranks():
    topology = cpu_grid("8x8", failed="2x2@2,2")
    program = compiled(ring_mesh(topology), a_sum, np.ones((60, 4), np.float16))
    (entry,) = ftmesh.audit(program, "data", plan=topology)
    assert entry.problem == (
        "it adds 60 numbers in 16 bits: a sum in float16 could be 2.9% off, 1% is the bound"
    )
    assert entry.sources == (line_of(a_sum, "lax."),)


# Arguments --------------------------------------------------------------------------------------


def test_plans_that_do_not_fit(topology):
    program = compiled(ring_mesh(topology), a_sum)
    with pytest.raises(ArgumentError, match="4x4 was made without devices: make it for Topology"):
        ftmesh.audit(program, "data", plan=ftmesh.plan(Topology.grid("4x4")))
    other = Topology.from_devices(jax.devices()[16:32], shape="4x4")
    with pytest.raises(ArgumentError, match="which is not among the devices of 4x4: give the plan"):
        ftmesh.audit(program, "data", plan=other)
    with pytest.raises(ArgumentError, match="an abstract mesh has no devices"):
        ftmesh.audit(
            program.as_text(), "data", plan=topology, mesh=ring_mesh(topology).abstract_mesh
        )
