"""The audit finds collectives that are not the plan's, with their source lines."""

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
from ftmesh import ArgumentError, CollectiveError
from ftmesh.algorithms import registry
from ftmesh.errors import UnreadableError
from ftmesh.testing import cpu_grid

BOTH = P(("data", "model"))
X = np.ones((12, 12, 4), np.float32)


@pytest.fixture(scope="module")
def mesh():
    """Six ranks along "data", and two along "model"."""
    return Mesh(np.array(jax.devices()[:12]).reshape(6, 2), ("data", "model"))


def compiled(mesh, body, *args, in_specs=BOTH, out_specs=BOTH, check_vma=False):
    run = jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(run).lower(*(args or (X,))).compile()


def line_of(function, text):
    """Where in this file a function has some text."""
    lines, start = inspect.getsourcelines(function)
    (at,) = [start + i for i, line in enumerate(lines) if text in line]
    return f"{Path(__file__)}:{at}"


# Planted, each along "data" -----------------------------------------------------------------------


def an_all_reduce(x):
    x = x + 1
    return lax.psum(x, "data")


def a_mean_along_both(x):
    return lax.pmean(x, ("data", "model"))


def two_that_are_joined(x):
    first = lax.psum(x, "data")
    second = lax.psum(x * 2, "data")
    return jnp.concatenate([first, second], axis=1)


def a_reduce_scatter(x):
    return lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)


def an_all_gather(x):
    return lax.all_gather(x, "data", axis=1, tiled=True)


def an_all_to_all(x):
    return lax.all_to_all(x, "data", 1, 1, tiled=True)


def a_permutation(x):
    return lax.ppermute(x, "data", [(0, 1), (1, 0)])


def a_maximum(x):
    return lax.pmax(x, "data")


def one_in_a_scan(x):
    def step(carry, _):
        return 0.5 * lax.psum(carry, "data"), None

    return lax.scan(step, x, None, length=3)[0]


def one_in_a_branch(x):
    return lax.cond(x.sum() > 3, lambda x: lax.psum(x, "data"), lambda x: 2 * x, x)


ALL = X[:1].nbytes  # what a device has of it
PLANTED = [
    (an_all_reduce, "lax.psum", "all-reduce", ALL, "call plan.psum or plan.pmean"),
    (a_mean_along_both, "lax.pmean", "all-reduce", ALL, "call plan.psum or plan.pmean"),
    (a_reduce_scatter, "lax.psum_scatter", "reduce-scatter", ALL, "call plan.psum_scatter"),
    (an_all_gather, "lax.all_gather", "all-gather", 6 * ALL, "call plan.all_gather"),
    (an_all_to_all, "lax.all_to_all", "all-to-all", ALL, "exchange along another mesh axis"),
    (a_permutation, "lax.ppermute", "collective-permute", ALL, "it may cross failed chips"),
    (a_maximum, "lax.pmax", "all-reduce", ALL, "call plan.pmax"),
    (one_in_a_scan, "lax.psum", "all-reduce", ALL, "call plan.psum or plan.pmean"),
    (one_in_a_branch, "lax.psum", "all-reduce", ALL, "call plan.psum or plan.pmean"),
]


@pytest.mark.parametrize(
    ("body", "text", "kind", "num_bytes", "advice"), PLANTED, ids=[p[0].__name__ for p in PLANTED]
)
def test_finds_collective_with_source_line(mesh, body, text, kind, num_bytes, advice):
    (entry,) = ftmesh.audit(compiled(mesh, body), "data")
    assert entry.kind == kind
    assert entry.num_bytes == num_bytes
    assert entry.axes == (("data", "model") if body is a_mean_along_both else ("data",))
    assert entry.sources == (line_of(body, text),)
    assert advice in entry.advice


def test_combined_collective_names_all_lines(mesh):
    (entry,) = ftmesh.audit(compiled(mesh, two_that_are_joined), "data")
    assert entry.num_bytes == 2 * ALL
    assert sorted(entry.sources) == [
        line_of(two_that_are_joined, "first = "),
        line_of(two_that_are_joined, "second = "),
    ]


def test_other_axes_are_not_listed(mesh):
    program = compiled(mesh, lambda x: lax.psum(x, "model"))
    assert not ftmesh.audit(program, "data")
    assert len(ftmesh.audit(program, "model")) == 1


def test_single_device_program_needs_no_mesh():
    ftmesh.audit(jax.jit(lambda x: x + 1).lower(X), "data").require_none()


def test_report_text(mesh):
    entries = ftmesh.audit(compiled(mesh, an_all_reduce), "data")
    line = line_of(an_all_reduce, "lax.psum")
    assert str(entries).splitlines() == [
        "1 collective does not follow the plan along 'data'",
        f"  all-reduce of 192 B along data, from {line}",
        "    jit(an_all_reduce)/shard_map/psum",
        "    call plan.psum or plan.pmean instead of jax.lax's",
    ]
    with pytest.raises(CollectiveError, match="all-reduce of 192 B along data"):
        entries.require_none()
    clean = ftmesh.audit(compiled(mesh, lambda x: x + 1), "data")
    assert str(clean) == "all collectives along 'data' follow the plan"
    clean.require_none()


def test_collectives_of_the_partitioner(mesh):
    """A step of jit and shardings alone, in which no sum is written."""
    batch = jax.device_put(X, NamedSharding(mesh, P("data")))
    weights = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P()))

    def loss(weights, batch):
        return jnp.mean((batch @ weights) ** 2)

    program = jax.jit(jax.grad(loss)).lower(weights, batch).compile()
    entries = list(ftmesh.audit(program, "data"))
    assert {entry.kind for entry in entries} == {"all-reduce"}
    assert all("use plan.value_and_grad(loss)" in entry.advice for entry in entries)
    assert line_of(loss, "batch @ weights") in {line for entry in entries for line in entry.sources}


def test_gradients_that_jax_sums(twelve):
    """Under check_vma, of parameters that are the same everywhere."""

    def body(weight, x, varies):
        weight = lax.pcast(weight, "data", to="varying") if varies else weight
        grads = jax.grad(lambda w: jnp.sum(jnp.sin(w * x)))(weight)
        return twelve.pmean(grads, "data") if varies else grads

    def program(varies):
        return compiled(
            twelve.jax_mesh("data"),
            lambda weight, x: body(weight, x, varies),
            np.ones(4, np.float32),
            X,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=True,
        )

    (entry,) = ftmesh.audit(program(False), "data")
    assert entry.sources == (line_of(body, "jnp.sin"),)
    assert entry.advice == (
        "JAX sums the gradient of replicated values, usually parameters: use "
        "plan.value_and_grad(loss), or differentiate with respect to jax.lax.pcast(params, "
        "'data', to='varying') and plan.pmean the gradients"
    )
    assert not ftmesh.audit(program(True), "data")


def test_accepts_lowered_programs_and_text(mesh):
    run = jax.jit(jax.shard_map(an_all_reduce, mesh=mesh, in_specs=BOTH, out_specs=BOTH))
    lowered = run.lower(X)
    (entry,) = ftmesh.audit(lowered, "data")
    text = lowered.compile().as_text()
    assert list(ftmesh.audit(text, "data", mesh=mesh)) == [entry]
    assert list(ftmesh.audit(text, "data", mesh=mesh.abstract_mesh)) == [entry]
    with pytest.raises(ArgumentError, match=r"give it, as in audit\(..., 'data', mesh=plan"):
        ftmesh.audit(text, "data")
    with pytest.raises(ArgumentError, match=r"no axis 'rows': give one of \('data', 'model'\)"):
        ftmesh.audit(text, "rows", mesh=mesh)
    with pytest.raises(
        ArgumentError, match="has no axis 'dta'"
    ):  # even if there are no collectives
        ftmesh.audit(compiled(mesh, lambda x: x + 1), "dta")
    small = Mesh(np.array(jax.devices()[:4]), ("data",))
    with pytest.raises(ArgumentError, match="names device 11 and the mesh has 4"):
        ftmesh.audit(text, "data", mesh=small)
    with pytest.raises(ArgumentError, match="audit takes what jit"):
        ftmesh.audit(lambda x: x, "data")


# Programs of other compilers ----------------------------------------------------------------------

FOREIGN = """\
HloModule jit_step, is_scheduled=true, num_partitions=12

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[8]) -> f32[2] {
  %p = f32[8] parameter(0)
  ROOT %rs = f32[2] reduce-scatter(%p), channel_id=3, replica_groups=[2,6]<=[6,2]T(1,0), \
use_global_device_ids=true, dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/a" \
source_file="step.py" source_line=7}
}

ENTRY %main (x: f32[8]) -> f32[2] {
  %x = f32[8] parameter(0)
  %s = ((f32[8]), f32[2], u32[]) async-start(%x), calls=%wrapped
  %d = f32[2] async-done(%s)
  %g = (f32[8], f32[48]) all-gather-start(%x), channel_id=4, replica_groups=mesh['axis_0'=6,\
'axis_1'=2] {'axis_0'}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/b"}
  %h = f32[48] all-gather-done(%g)
  %m = (f32[8], f32[16]) all-gather-start(%x), channel_id=5, replica_groups=mesh['axis_0'=6,\
'axis_1'=2] {'axis_1'}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/c"}
  %n = f32[16] all-gather-done(%m)
  %r = (f32[8], bf16[4]) all-reduce-start(%x, %y), channel_id=6, replica_groups={{0,2,4,6,8,10},\
{1,3,5,7,9,11}}, use_global_device_ids=true, to_apply=%add
  %q = (f32[8], bf16[4]) all-reduce-done(%r)
  %z = f32[8] get-tuple-element(%q), index=0, metadata={op_name="d" source_file="step.py" \
source_line=9}
  %c = (f32[8], f32[8]) collective-permute-start(%x), channel_id=8, \
source_target_pairs={{0,2},{2,0}}, metadata={op_name="jit(step)/ftmesh.all_reduce/ppermute"}
  %f = (f32[8], f32[8]) collective-permute-start(%x), channel_id=8, \
source_target_pairs={{0,2},{2,0}}, metadata={op_name="jit(ftmesh)/ppermute"}
  ROOT %out = f32[2] negate(%d)
}
"""


def test_asynchronous_ops_and_replica_group_formats(mesh):
    entries = ftmesh.audit(FOREIGN, "data", mesh=mesh)
    assert [(entry.kind, entry.num_bytes, entry.sources) for entry in entries] == [
        ("reduce-scatter", 48, ("step.py:7",)),
        ("all-gather", 192, ()),
        ("all-reduce", 40, ("step.py:9",)),
        ("collective-permute", 32, ()),
    ]
    assert [entry.op_name for entry in ftmesh.audit(FOREIGN, "model", mesh=mesh)] == ["jit(step)/c"]
    assert "an unknown line" in str(entries)


def test_collective_split_over_fusions_is_listed_once(mesh):
    """As the compiler for v5e has it, which computes something else meanwhile."""
    gather = """\
%fused.N (p: f32[2]) -> f32[12] {
  %p = f32[2]{0:T(128)} parameter(0)
  ROOT %g.N = f32[12]{0:T(128)} all-gather(%p), channel_id=C, dimensions={0}, \
replica_groups={{0,2,4,6,8,10},{1,3,5,7,9,11}}, use_global_device_ids=true, \
frontend_attributes={chain_id="C"}, metadata={op_name="ws[C]"}, backend_config={"id":"N"}
}

"""
    parts = [("0", "0"), ("1", "1"), ("2", "0"), ("3", "0"), ("4", "1")]
    fusions = "".join(gather.replace("N", n).replace("C", chain) for n, chain in parts)
    text = f"{fusions}ENTRY %main (x: f32[2]) -> f32[2] {{\n  ROOT %x = f32[2] parameter(0)\n}}\n"
    entries = ftmesh.audit(text, "data", mesh=mesh)
    assert [(entry.kind, entry.op_name) for entry in entries] == [
        ("all-gather", "ws[0]"),
        ("all-gather", "ws[1]"),
    ]


@pytest.mark.usefixtures("unprinted")
def test_unreadable_program_raises():
    program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    with pytest.raises(UnreadableError, match="versions of JAX and of the compiler"):
        ftmesh.audit(program, "data")


def test_multi_line_kernel_instructions_are_skipped(mesh):
    """Which the TPU compiler prints over several lines."""
    kernel = """\
  %k = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"mesh_axes":"[\\"data\\"]"
}}, metadata={op_name="jit(step)/pallas_call"}
"""
    first = "  %s = ((f32[8])"
    with_kernel = FOREIGN.replace(first, kernel + first)
    assert with_kernel != FOREIGN
    assert list(ftmesh.audit(with_kernel, "data", mesh=mesh)) == list(
        ftmesh.audit(FOREIGN, "data", mesh=mesh)
    )


def gathered_and_scattered(plan):
    def step(x):
        gathered = plan.all_gather(x, "data", tiled=True)
        return plan.psum_scatter(gathered * 2, "data", tiled=True)

    specs = {"in_specs": P("data"), "out_specs": P("data")}
    run = jax.jit(jax.shard_map(step, mesh=plan.jax_mesh("data"), **specs))
    program = run.lower(np.ones(12, np.float32)).compile()
    lines = [line_of(gathered_and_scattered, f"plan.{name}") for name in ("all_ga", "psum_sc")]
    return lines, ftmesh.audit(program, "data")


def test_whole_all_reduces_for_uneven_owners():
    """Those of a given schedule are named; a plan that may choose takes even owners."""
    topology = cpu_grid("4x2", failed="2x1@0,0")  # six chips
    even = ftmesh.plan(topology, "flood")
    lines, report = gathered_and_scattered(even)
    assert not report.whole
    assert "whole all-reduce" not in f"{report}{even}"
    schedule = registry.build_schedule(topology, "row_pair")  # eight chunks
    given = ftmesh.Plan.from_schedule(schedule, topology)
    lines, report = gathered_and_scattered(given)
    assert not report
    assert report.whole
    assert {*report.whole} <= {*lines}
    assert f"run the whole all-reduce of the plan, twice the data, as at {report.whole[0]}" in str(
        report
    )
    assert "all_gather run the whole all-reduce, twice the data: this one leaves" in str(given)
    for algorithm in ("auto", "tree"):
        plan = ftmesh.plan(topology, algorithm, payload_bytes=4_000, executor="ppermute")
        assert plan.algorithm == "tree"
        assert "run another plan, print(plan.with_reduce_scatter): this one has no" in str(plan)
        assert plan.with_reduce_scatter.schedule.owns_evenly
        assert not gathered_and_scattered(plan)[1].whole
