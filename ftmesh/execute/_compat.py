"""All contact with what JAX does not promise to keep: primitives, varying axes, batching rules.

Under ``shard_map(check_vma=True)`` every value has a set of mesh axes over which it may differ, and
nothing public takes an axis out of that set. A sum over ranks must, as `lax.psum` does; so ftmesh's
collectives are primitives of their own, which say what they do to types, derivatives and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import lax
from jax._src import callback, clusters, config, core, distributed, xla_bridge
from jax._src.lax import lax as internal_lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

AxisName = Hashable

# Before, JAX could not tell ranks apart inside two shard_maps, over one axis and then over others.
NESTS_SHARD_MAPS = jax.__version_info__ >= (0, 10)

MARK = "ftmesh."  # in front of the names of scopes in which a plan's own permutations are made


def own_scope(name: str) -> Any:
    """A scope for a plan's own permutations, by which they are told from others when compiled."""
    return jax.named_scope(f"{MARK}{name}")


def checks_varying() -> bool:
    """Whether values carry the axes they vary over: inside ``shard_map(check_vma=True)``."""
    return bool(config._check_vma.value)


def unchecked_types() -> Any:
    """A context in which values need not carry the axes they vary over."""
    return config._check_vma(False)


def varying_axes(x: Any) -> frozenset[AxisName]:
    """The axes over which `x` may differ; empty where nothing is checked."""
    return _varying(jax.typeof(x))


def to_varying(x: Any, axis_name: AxisName) -> Any:
    """`x` as a value that may differ along `axis_name`."""
    return lax.pcast(x, axis_name, to="varying")


def as_varying(x: Any, axis_name: AxisName) -> Any:
    """`x` as a value that may differ along `axis_name`, where that is checked and not so yet."""
    return to_varying(x, axis_name) if checks_varying() and axis_name not in varying_axes(x) else x


def varying_as(x: Any, other: Any) -> Any:
    """`x` as a value that may differ along all axes that `other` may differ along."""
    for axis_name in sorted(varying_axes(other) - varying_axes(x), key=str):
        x = to_varying(x, axis_name)
    return x


def times_constant(x: Any, size: int) -> Any:
    """A constant times `size`, of the type that `lax.psum` gives it: a Python number stays one."""
    return internal_lax._const(x, size) * x


def weak_as(x: Any, other: Any) -> Any:
    """`x` with a weak type where `other` has one."""
    if not other.weak_type:
        return x
    return internal_lax._convert_element_type(x, x.dtype, weak_type=True)


def sum_as(total: Any, x: Any, axis_name: AxisName) -> Any:
    """A sum of `x` with a weak type where `lax.psum` gives it one, as some versions do."""
    if not jax.typeof(x).weak_type:
        return total
    return weak_as(total, jax.eval_shape(lambda x: lax.psum(x, axis_name), x))


def zeros_as_sum(x: Any, axis_name: AxisName) -> Any:
    """Zeros in place of a sum of `x` along an axis, typed as that would be."""
    zeros = sum_as(jax.numpy.zeros(x.shape, x.dtype), x, axis_name)
    for other in sorted(varying_axes(x) - {axis_name}, key=str):
        zeros = to_varying(zeros, other)
    return zeros


def zeros_of(aval: Any, dtype: Any) -> Any:
    """Zeros in `dtype` of the shape of a type, which may differ along the axes that it may."""
    zeros = jax.numpy.zeros(aval.shape, dtype)
    for axis_name in sorted(_varying(aval), key=str):
        zeros = to_varying(zeros, axis_name)
    return zeros


def axis_exists(axis_name: AxisName) -> bool:
    """Whether `axis_name` is bound here, by shard_map, pmap or vmap."""
    return bool(core.get_axis_env().axis_exists(axis_name))


def _varying(aval: Any) -> frozenset[AxisName]:
    mat = getattr(aval, "mat", None)  # JAX 0.10 and later
    return frozenset(aval.vma if mat is None else mat.varying)


def _typed(aval: Any, axis_name: AxisName, *, varying: bool) -> Any:
    """The type `aval` with or without `axis_name` among its varying axes."""
    axes = _varying(aval) - {axis_name} | ({axis_name} if varying else set())
    if hasattr(aval, "mat"):
        return aval.update(manual_axis_type=aval.mat.update(varying=axes))
    return aval.update(vma=axes)


def barrier(values: list[Any]) -> list[Any]:
    """`lax.optimization_barrier`, but values may vary over different axes, and keep their types."""
    return list(_barrier.bind(*values)) if values else []


def linear_collective(
    name: str,
    run: Callable[..., Any],
    transpose: Callable[..., Any],
    transpose_of_invariant: Callable[..., Any] | None = None,
    *,
    makes_varying: bool = False,
    check_mesh: Callable[..., None],
    is_interpreted: Callable[..., bool] = lambda **_: False,
) -> Primitive:
    """A primitive over one named axis, linear in its one array argument, shape and type kept.

    ``run(x, axis_name=..., emulated=..., **params)`` is the program of one rank; `emulated` tells
    that the axis is that of a vmap. ``transpose(cotangent, axis_name=..., **params)`` is its
    transpose. With `transpose_of_invariant` the result is typed as the same along the axis, where
    that is checked; then its cotangent is too, and that is its transpose, which must vary. One that
    `makes_varying` is for there alone: it takes what is typed as the same and gives what is not.
    ``check_mesh(mesh, axis_name=..., **params)`` may refuse the devices it is to run on, and
    ``is_interpreted(**params)`` tells whether `run` calls back to Python while it runs.
    Dimensions behind those of one array are carried along: so vmaps over other axes work.
    """
    primitive = Primitive(f"ftmesh_{name}")
    makes_invariant = transpose_of_invariant is not None

    def abstract_eval(aval: Any, *, axis_name: AxisName, **params: Any) -> Any:
        effects: set[Any] = {core.NamedAxisEffect(axis_name)}
        if is_interpreted(**params):
            effects |= {callback._OrderedIOEffect, callback._IOEffect}
        if makes_invariant or (makes_varying and checks_varying()):
            aval = _typed(aval, axis_name, varying=makes_varying)
        return aval, effects

    def one_rank(x: Any, **params: Any) -> Any:
        with own_scope(name):
            return run(x, emulated=False, **params)

    def batch(axis_data: Any, values: Any, dims: Any, *, axis_name: AxisName, **params: Any) -> Any:
        (x,), (dim,) = values, dims
        if axis_data.name != axis_name:
            if dim is None:
                return primitive.bind(x, axis_name=axis_name, **params), None
            x = jax.numpy.moveaxis(x, dim, -1)
            return primitive.bind(x, axis_name=axis_name, **params), x.ndim - 1
        if dim is None:
            x, dim = jax.numpy.broadcast_to(x, (axis_data.size, *x.shape)), 0

        def every_rank(x: Any) -> Any:
            return run(x, axis_name=axis_name, emulated=True, **params)

        return jax.vmap(every_rank, in_axes=dim, axis_name=axis_name)(x), 0

    def transpose_rule(cotangent: Any, x: Any, *, axis_name: AxisName, **params: Any) -> Any:
        if transpose_of_invariant is not None and checks_varying():
            return (transpose_of_invariant(cotangent, axis_name=axis_name, **params),)
        return (transpose(cotangent, axis_name=axis_name, **params),)

    lower_one_rank = mlir.lower_fun(one_rank, multiple_results=False)

    def lowering(ctx: Any, x: Any, **params: Any) -> Any:
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh):
            check_mesh(mesh, **params)
        return lower_one_rank(ctx, x, **params)

    primitive.def_effectful_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lowering)
    ad.deflinear2(primitive, transpose_rule)
    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


_barrier = Primitive("ftmesh_barrier")
_barrier.multiple_results = True
_barrier.def_abstract_eval(lambda *avals: list(avals))
_barrier.def_impl(lambda *values: list(values))  # nothing is reordered outside a compiled program
mlir.register_lowering(_barrier, internal_lax._optimization_barrier_lowering_rule)
batching.primitive_batchers[_barrier] = lambda values, dims: (_barrier.bind(*values), dims)


def _barrier_but_zeros(values: Any) -> list[Any]:
    """Values behind a barrier; of what is known to be zero nothing is computed."""
    passed = iter(barrier([value for value in values if type(value) is not ad.Zero]))
    return [value if type(value) is ad.Zero else next(passed) for value in values]


def _barrier_jvp(primals: Any, tangents: Any) -> Any:
    return barrier(primals), _barrier_but_zeros(tangents)


def _barrier_transpose(cotangents: Any, *_: Any) -> Any:
    return _barrier_but_zeros(cotangents)


ad.primitive_jvps[_barrier] = _barrier_jvp
ad.primitive_transposes[_barrier] = _barrier_transpose


def coordination_client() -> Any:
    """JAX's client of the coordination service; None in a process that has joined no others."""
    return distributed.global_state.client


def join_service(address: str, num_processes: int, process: int, limit: float) -> None:
    """Join the processes at a coordination service that runs in a process of its own.

    Then JAX takes no process for special, and goes on when some of them are gone.
    """
    jax.config.update("jax_enable_recoverability", True)
    state = distributed.global_state
    state.client = xla_bridge._jax.get_distributed_runtime_client(
        address, process, init_timeout=max(1, round(limit)), use_compression=True
    )
    state.client.connect()
    state.process_id, state.num_processes = process, num_processes
    state.coordinator_address = address


def known_processes() -> tuple[int, int]:
    """The number of this process among those that have joined, and how many these are."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def has_devices() -> bool:
    """Whether JAX has made its devices, and with them its mind up about processes."""
    return bool(xla_bridge.backends_are_initialized())


def found_processes(limit: float) -> tuple[str | None, int | None, int | None]:
    """Coordinator, number of processes and number of this one, where JAX knows of a place."""
    address, number, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, max(1, round(limit))
    )
    return address, number, process


def cpu_collectives_at(host: str) -> None:
    """Have collectives of CPU devices listen at `host`, and not wherever the host's name leads."""

    def make() -> Any:
        collectives = xla_bridge._jax.make_gloo_tcp_collectives(coordination_client(), host)
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)
