"""A user's training code, for the type checker alone: it must pass ``mypy --strict``."""

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import checkpoint, collectives, distributed, elastic, health, nn, optim, testing
from ftmesh.execute.types import PlanLike


def plan_for_slice() -> ftmesh.Plan:
    topology = ftmesh.Topology.grid("8x8", failed="2x2@2,2")
    tiles = ftmesh.TiledTopology.from_topology(topology, "2x2")
    plan = ftmesh.plan(tiles, "auto", payload_bytes=10**8, wire_dtype="bfloat16", with_idle=False)
    ftmesh.save(plan.schedule, "plan.npz")
    again = ftmesh.Plan.from_schedule(ftmesh.load("plan.npz"))
    proof: ftmesh.Proof = ftmesh.verify(again.schedule)
    simulation: ftmesh.Simulation = ftmesh.simulate(plan.schedule, payload_bytes=10**8, link="v5p")
    bound: ftmesh.Limits = ftmesh.limits(topology)
    print(
        proof.num_ranks,
        simulation.seconds,
        bound,
        plan.for_payload(4),
        ftmesh.jax_mesh(topology, "data"),
    )
    return plan.unrolled_variant


def combine(plan: ftmesh.Plan, x: jax.Array, params: dict[str, jax.Array]) -> None:
    protocol: PlanLike = plan  # what collectives and optimizers take
    total = ftmesh.psum(params, "data", plan=protocol, accumulate_dtype=np.float32)
    mean = plan.pmean(total, "data", wire_dtype="bfloat16", bucket_bytes=2**20)
    block = plan.psum_scatter(mean, "data", scatter_dimension=0, tiled=True, specs=P())
    print(plan.all_gather(block, "data", axis=0, tiled=True))
    shares = collectives.BatchShares.for_ranks(plan, 512)
    batch, weights = shares.pad_batch({"x": np.zeros((512, 3))})
    print(collectives.weighted_sum(batch["x"][:, 0], weights))


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (x @ params["w"]) ** 2


def train(group: elastic.ElasticGroup) -> int:
    topology = ftmesh.Topology.from_devices(jax.devices())
    plan = distributed.agreed_plan(group.for_topology(topology), topology)
    params = {"w": np.zeros(3, np.float32)}
    marked = collectives.with_mean_gradients(params, "data", plan=plan.unrolled_variant)
    order = collectives.backward_order(loss, marked, np.ones((4, 3)))
    run = collectives.accumulate_gradients(jax.value_and_grad(loss), 4, mean=True)
    optimizer = plan.shard(optim.lamb(1e-3, weight_decay_mask=optim.matrix_mask), order=order)
    chained = optim.ShardedOptimizer(
        optax.chain(optim.clip_by_global_norm(1.0), optim.lars(0.1)), plan
    )
    state = chained.shard_state(chained.gather_state(chained.init(params), params), params)
    value_and_grad = plan.value_and_grad(loss, replicated=(), weighted=False, per_rank=False)
    plan.check(loss, params, np.ones((8, 3)), tolerance=1e-5).require_equal()
    step = jax.jit(value_and_grad, compiler_options=ftmesh.compiler_options("tpu v6e"))
    audit = ftmesh.audit(step.lower(params, np.ones((8, 3))), "data", mesh=plan.jax_mesh("data"))
    audit.require_none()
    native = ftmesh.audit(step.lower(params, np.ones((8, 3))), "data", plan=plan)
    print([entry.seconds for entry in native.native], native.network)
    batch, mask = ftmesh.pad_batch({"x": np.ones((7, 3))}, plan, microbatches=2)
    print(batch, mask.sum(), ftmesh.batch_padding(7, plan), ftmesh.nearest_batch_size(7, 4))
    print([entry.advice for entry in audit], run, optimizer.specs(params))
    with checkpoint.Checkpoints("saved", resume=True) as checkpoints:
        first_step, state = checkpoints.restore(state, full_types=chained.full_types(params))
        checkpoints.save(first_step + 1, state, full_types=chained.full_types(params))
        print(checkpoint.read_tensors(checkpoints.folder / "1"))
    findings: health.Findings = health.examine(topology, group=group, timeout=60.0)
    print(
        findings, health.check_replicas(params, topology), NamedSharding(plan.jax_mesh("data"), P())
    )
    groups = nn.ChipGroups.for_examples(plan, 64, 512)
    norms = (
        nn.GroupBatchNorm(groups=groups, axis_name="data"),
        nn.mean_batch_stats({}, "data", plan=plan),
    )
    print(norms, nn.ChipGroups.of_size(topology, chips=4).ranks)
    return first_step


def test_on_one_device() -> None:
    plan = ftmesh.plan(testing.cpu_grid("4x4", failed="1x1@0,0"))
    testing.on_one_device(lambda x: combine(plan, x, {"w": x}))(np.ones((15, 3)))
    with elastic.initialize() as group:
        print(train(group))
