"""All use of JAX internals: primitives, varying axes, batching rules, the distributed runtime.

Under ``shard_map(check_vma=True)`` every value carries the set of mesh axes over which it may vary,
and no public function removes an axis from that set. A sum over ranks must, as `lax.psum` does. So
ftmesh's collectives are primitives of their own, with rules for types, derivatives and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax._src import callback, clusters, config, core, distributed, source_info_util, xla_bridge
from jax._src.interpreters import partial_eval
from jax._src.lax import lax as internal_lax
from jax._src.lax import parallel
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

AxisName = Hashable

# Older versions cannot compute the rank inside two nested shard_maps over different axes.
SUPPORTS_NESTED_SHARD_MAP = jax.__version_info__ >= (0, 10)

SCOPE_PREFIX = "ftmesh."  # of the name scopes around a plan's own permutations


def plan_scope(name: str) -> Any:
    """A name scope that marks a plan's own permutations in the compiled program."""
    return jax.named_scope(f"{SCOPE_PREFIX}{name}")


# Varying axes -----------------------------------------------------------------------------------


def checks_vma() -> bool:
    """True inside ``shard_map(check_vma=True)``, where values carry the axes they vary over."""
    return bool(config._check_vma.value)


def without_vma_check() -> Any:
    """A context in which values need not carry the axes they vary over."""
    return config._check_vma(False)


def varying_axes(x: Any) -> frozenset[AxisName]:
    """The axes over which `x` may vary; empty if that is not checked."""
    return _varying(jax.typeof(x))


def as_varying(x: Any, axis_name: AxisName) -> Any:
    """Type `x` as varying over `axis_name`, if that is checked and not so already."""
    return _varying_over(x, {axis_name} - varying_axes(x)) if checks_vma() else x


def varying_like(x: Any, other: Any) -> Any:
    """Type `x` as varying over all axes that `other` varies over."""
    return _varying_over(x, varying_axes(other) - varying_axes(x))


def zeros_like_psum(x: Any, axis_name: AxisName) -> Any:
    """Zeros with the type of ``lax.psum(x, axis_name)``."""
    zeros = weak_like_psum(jax.numpy.zeros(x.shape, x.dtype), x, axis_name)
    return _varying_over(zeros, varying_axes(x) - {axis_name})


def zeros_of_aval(aval: Any, dtype: Any) -> Any:
    """Zeros in `dtype` with the shape and the varying axes of a type."""
    return _varying_over(jax.numpy.zeros(aval.shape, dtype), _varying(aval))


def axis_exists(axis_name: AxisName) -> bool:
    """True if `axis_name` is bound here, by shard_map, pmap or vmap."""
    return bool(core.get_axis_env().axis_exists(axis_name))


def _varying_over(x: Any, axis_names: AbstractSet[AxisName]) -> Any:
    for axis_name in sorted(axis_names, key=str):
        x = lax.pcast(x, axis_name, to="varying")
    return x


def _varying(aval: Any) -> frozenset[AxisName]:
    mat = getattr(aval, "mat", None)  # JAX 0.10 and later
    return frozenset(aval.vma if mat is None else mat.varying)


def _typed(aval: Any, axis_name: AxisName, *, varying: bool) -> Any:
    """The type `aval` with or without `axis_name` among its varying axes."""
    axes = _varying(aval) - {axis_name} | ({axis_name} if varying else set())
    if hasattr(aval, "mat"):
        return aval.update(manual_axis_type=aval.mat.update(varying=axes))
    return aval.update(vma=axes)


def all_gather_invariant(x: Any, axis_name: AxisName, *, tiled: bool) -> Any:
    """``lax.all_gather(x, axis_name)``, typed as the same on all ranks."""
    if not checks_vma():
        return lax.all_gather(x, axis_name, tiled=tiled)
    return parallel.all_gather_invariant(x, axis_name, tiled=tiled)


# Weak types -------------------------------------------------------------------------------------


def scale_constant(x: Any, size: int) -> Any:
    """`x` times `size`, typed as `lax.psum` types a constant: a Python number stays one."""
    return internal_lax._const(x, size) * x


def weak_like(x: Any, other: Any) -> Any:
    """`x` with a weak type if `other` has one."""
    if not other.weak_type:
        return x
    return internal_lax._convert_element_type(x, x.dtype, weak_type=True)


def weak_like_psum(total: Any, x: Any, axis_name: AxisName) -> Any:
    """A sum of `x` with a weak type if this version's `lax.psum` gives it one."""
    if not jax.typeof(x).weak_type:
        return total
    return weak_like(total, jax.eval_shape(lambda x: lax.psum(x, axis_name), x))


# Traced programs --------------------------------------------------------------------------------

_PACKAGE = str(Path(__file__).parent.parent)

# In older versions the lines of a function that was traced before include those of its caller then.
LINES_END_AT_JIT = jax.__version_info__ >= (0, 10)


def is_program(param: Any) -> bool:
    """True if a parameter of an equation is a program, or several."""
    if isinstance(param, (tuple, list)):
        return any(map(is_program, param))
    return isinstance(param, (Jaxpr, ClosedJaxpr))


def without_dead_code(jaxpr: Any) -> Any:
    """A program without equations whose results are not used; inputs stay."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def bind_equation(eqn: Any, operands: Any, params: dict[str, Any]) -> list[Any]:
    """Run the operation of an equation on other operands, with some parameters changed."""
    known = eqn.primitive.get_bind_params(eqn.params)
    functions, known = known if isinstance(known, tuple) else ([], known)  # a pair in JAX 0.9
    known = {name: None if name in ("sharding", "out_sharding") else known[name] for name in known}
    result = eqn.primitive.bind(*functions, *operands, **{**known, **params})
    return list(result) if eqn.primitive.multiple_results else [result]


def num_scan_inputs(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan, by its parameters."""
    if "ft_in" in params:  # JAX 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def mapped_axes(params: dict[str, Any]) -> frozenset[AxisName]:
    """The mesh axes over which a shard_map maps, by its parameters."""
    if "newly_manual_axes" in params:  # JAX 0.10 and later
        return frozenset(params["newly_manual_axes"])
    return frozenset(params["manual_axes"])


def eval_program(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    """Run the operations of a program."""
    return list(core.eval_jaxpr(jaxpr, consts, *args))


def is_tracing() -> bool:
    """True inside jit, grad, vmap and other transformations."""
    return not core.trace_state_clean()


def source_of(eqn: Any) -> Any:
    """A context in which operations have the source line and the name scopes of an equation."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=names)


def source_lines(eqn: Any) -> list[tuple[str, int]]:
    """Files and lines that led to an equation, innermost first: a user's own if there are any."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    lines = [(f.file_name, f.start_line) for f in frames if not f.file_name.startswith(_PACKAGE)]
    return [line for line in lines if "site-packages" not in line[0]] or lines


def names_manual_axis(error: ValueError) -> bool:
    """True if JAX raised it for a sharding constraint along an axis that is bound."""
    texts = ("can only refer to Auto axes", "`manual_axis_type` field")
    return any(text in str(error) for text in texts)


def raised_at(error: BaseException) -> str:
    """The file and line of a user that led to an error, such as ``train.py:12``."""
    where, entry = "an unknown line", error.__traceback__
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith(_PACKAGE):
            where = f"{Path(file).name}:{entry.tb_lineno}"
        entry = entry.tb_next
    return where


# Primitives -------------------------------------------------------------------------------------


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
    """Make a primitive over one named axis, linear in its one array argument, of the same shape.

    Batch dimensions follow those of the array, so vmaps over other axes work.

    Args:
        name: The name of the primitive and of the scope around its operations.
        run: ``run(x, axis_name=..., emulated=..., **params)``, the program of one rank. `emulated`
            is True if the axis is that of a vmap.
        transpose: ``transpose(cotangent, axis_name=..., **params)``.
        transpose_of_invariant: If given, the result is typed as the same along the axis, where that
            is checked. Then so is its cotangent, and this is the transpose, which must vary.
        makes_varying: The argument is typed as the same along the axis, and the result as varying.
        check_mesh: Called with the mesh and the params; raises if the primitive must not run there.
        is_interpreted: Called with the params; True if `run` calls back to Python at run time.
    """
    primitive = Primitive(f"ftmesh_{name}")
    makes_invariant = transpose_of_invariant is not None

    def abstract_eval(aval: Any, *, axis_name: AxisName, **params: Any) -> Any:
        effects: set[Any] = {core.NamedAxisEffect(axis_name)}
        if is_interpreted(**params):
            effects |= {callback._OrderedIOEffect, callback._IOEffect}
        if makes_invariant or (makes_varying and checks_vma()):
            aval = _typed(aval, axis_name, varying=makes_varying)
        return aval, effects

    def one_rank(x: Any, **params: Any) -> Any:
        with plan_scope(name):
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
        emulated_rank = partial(run, axis_name=axis_name, emulated=True, **params)
        return jax.vmap(emulated_rank, in_axes=dim, axis_name=axis_name)(x), 0

    def transpose_rule(cotangent: Any, x: Any, *, axis_name: AxisName, **params: Any) -> Any:
        if transpose_of_invariant is not None and checks_vma():
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


def barrier(values: list[Any]) -> list[Any]:
    """`lax.optimization_barrier` that keeps the types of values that vary over different axes."""
    return list(_barrier.bind(*values)) if values else []


_barrier = Primitive("ftmesh_barrier")
_barrier.multiple_results = True
_barrier.def_abstract_eval(lambda *avals: list(avals))
_barrier.def_impl(lambda *values: list(values))  # nothing is reordered outside a compiled program
mlir.register_lowering(_barrier, internal_lax._optimization_barrier_lowering_rule)
batching.primitive_batchers[_barrier] = lambda values, dims: (_barrier.bind(*values), dims)


def _barrier_except_zeros(values: Any) -> list[Any]:
    """Values behind a barrier; symbolic zeros stay as they are."""
    passed = iter(barrier([value for value in values if type(value) is not ad.Zero]))
    return [value if type(value) is ad.Zero else next(passed) for value in values]


ad.primitive_jvps[_barrier] = lambda xs, tangents: (barrier(xs), _barrier_except_zeros(tangents))
ad.primitive_transposes[_barrier] = lambda cotangents, *_: _barrier_except_zeros(cotangents)


# The distributed runtime ------------------------------------------------------------------------


def coordination_client() -> Any:
    """JAX's client of the coordination service; None if this process has not joined one."""
    return distributed.global_state.client


def join_coordination_service(
    address: str, num_processes: int, process: int, timeout: float
) -> None:
    """Join a coordination service that runs in a process of its own.

    Then no JAX process is special, and the others go on when some are gone.
    """
    jax.config.update("jax_enable_recoverability", True)
    state = distributed.global_state
    state.client = xla_bridge._jax.get_distributed_runtime_client(
        address, process, init_timeout=max(1, round(timeout)), use_compression=True
    )
    state.client.connect()
    state.process_id, state.num_processes = process, num_processes
    state.coordinator_address = address


def process_id_and_count() -> tuple[int, int]:
    """The id of this process among those that have joined, and their number."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def backends_are_initialized() -> bool:
    """True if JAX has created its devices, and can no longer join other processes."""
    return bool(xla_bridge.backends_are_initialized())


def detect_processes(timeout: float) -> tuple[str | None, int | None, int | None]:
    """Coordinator address, number of processes and process id, if JAX detects a known cluster."""
    address, number, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, max(1, round(timeout))
    )
    return address, number, process


def bind_cpu_collectives(host: str) -> None:
    """Make collectives of CPU devices listen on `host`, not on the address of the host's name."""
    if jax.config.jax_cpu_collectives_implementation == "mpi":
        return

    def make() -> Any:
        collectives = xla_bridge._jax.make_gloo_tcp_collectives(coordination_client(), host)
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)
