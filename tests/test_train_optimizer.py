"""Sharded optimizers against the same ones unsharded, and the memory they take."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.testing import cpu_grid, on_one_device
from ftmesh.train import Parallel, ShardedOptimizer, clip_by_global_norm, lamb, lars, matrices
from ftmesh.train.layerwise import squared_norms

pytestmark = pytest.mark.usefixtures("quick_compiler")

RNG = np.random.default_rng(0)
PARAMS = {
    "stem": RNG.normal(size=(3, 3, 16, 128)).astype(np.float32),
    "dense": {
        "kernel": RNG.normal(size=(45, 31)).astype(np.float32),
        "bias": RNG.normal(size=31).astype(np.float32),
    },
    "gain": np.float32(2),
    "empty": np.zeros((0, 3), np.float32),
}
FEW = PARAMS["dense"]
RATE = optax.linear_schedule(0.1, 0.02, 5)
OPTIMIZERS = {
    "sgd": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": optax.adamw(RATE, weight_decay=0.1, mask=matrices),
    "lars": lars(RATE, weight_decay=0.1, weight_decay_mask=matrices),
    "lamb": optax.chain(
        clip_by_global_norm(1.0), lamb(RATE, weight_decay=0.1, weight_decay_mask=matrices)
    ),
}
STEPS = 2


@pytest.fixture(scope="module")
def damaged():
    """Sixty chips around a hole; twelve of them own nothing."""
    return ftmesh.plan(cpu_grid("8x8", failed="2x2@2,2"), "row_pair")


@pytest.fixture(scope="module")
def uneven():
    """Twelve chips, of which four own nothing."""
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "row_pair")


@pytest.fixture(scope="module")
def small():
    """Twelve chips that own as much as each other."""
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring")


def gradients(params, num_ranks, step):
    """A gradient for every rank, as if from a batch of its own; their sums are exact."""
    rng = np.random.default_rng(step + 1)

    def one(leaf):
        return rng.integers(-50, 50, (num_ranks, *np.shape(leaf))).astype(np.float32) / 16

    return jax.tree.map(one, params)


def unsharded(transformation, params, num_ranks, steps=STEPS):
    state = transformation.init(params)
    for step in range(steps):
        grads = gradients(params, num_ranks, step)
        mean = jax.tree.map(lambda g: g.sum(axis=0) / num_ranks, grads)
        updates, state = transformation.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def sharded(optimizer, mesh, *, check_vma=True):
    specs = optimizer.specs(PARAMS)

    def step(grads, state, params):
        return optimizer.update(jax.tree.map(lambda g: g[0], grads), state, params)

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data"), specs, P()),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
    )
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    state = optimizer.init(PARAMS)
    for now in range(STEPS):
        params, state = step(gradients(PARAMS, mesh.size, now), state, params)
    return params, state


def assert_close(got, want, *, rtol=1e-5):
    """A few roundings of float32: of norms in another order, and of fused operations."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), got, want)


def state_bytes(state):
    """The bytes of a state on each device, as the arrays say."""
    on = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            on[shard.device] = on.get(shard.device, 0) + shard.data.nbytes
    return on


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_and_unsharded_agree_on_a_damaged_mesh(damaged, name):
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    params, state = sharded(optimizer, damaged.jax_mesh("data"), check_vma=name != "sgd")
    want_params, want_state = unsharded(OPTIMIZERS[name], PARAMS, 60)
    assert_close(params, want_params)
    for leaf in jax.tree.leaves(params):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(copies) == 1, "chips off the rings must have the same weights"

    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(want_state) if np.ndim(leaf))
    owners = len(set(damaged.schedule.owner.tolist()))
    assert owners == 48
    each = state_bytes(state)
    assert len(each) == 60
    assert max(each.values()) <= 1.02 * whole / owners + 16  # and a few counters


def test_a_chip_that_owns_nothing_holds_nothing_but_padding(uneven):
    optimizer = ShardedOptimizer(optax.sgd(0.1, momentum=0.9), uneven, "data")
    run = on_one_device(lambda g: optimizer.update(g, optimizer.init(FEW), FEW)[1])
    momentum = run(gradients(FEW, 12, 0)).inner[0].trace["kernel"]
    for rank, shard in enumerate(momentum):
        assert (np.abs(shard).max() > 0) == (rank in uneven.schedule.owner)


def test_the_state_goes_on_with_another_plan(small, uneven):
    """A step on one plan, the next on one with other owners: as if nothing had happened."""
    adam = optax.adam(0.1)
    before, after = (ShardedOptimizer(adam, plan, "data") for plan in (small, uneven))

    def run(first, second):
        params, state = before.update(first, before.init(FEW), FEW)
        state = after.shard_state(before.gather_state(state, params), params)
        return after.update(second, state, params)[0]

    params = on_one_device(run)(*(gradients(FEW, 12, step) for step in range(2)))
    assert_close(at(4, params), unsharded(adam, FEW, 12, steps=2)[0])


def test_the_state_is_gathered_and_sharded_outside_too(small):
    optimizer = ShardedOptimizer(optax.sgd(0.1, momentum=0.9), small, "data")
    momentum = {"kernel": FEW["kernel"] + 1, "bias": FEW["bias"] - 1}
    whole = (optax.TraceState(trace=momentum), optax.EmptyState())
    state = optimizer.shard_state(whole, FEW)
    assert state_bytes(state)[small.topology.devices[5]] == (2 * 59 + 2 * 2) * 4
    jax.tree.map(np.testing.assert_array_equal, optimizer.gather_state(state, FEW), whole)


@pytest.mark.parametrize(("name", "sums"), [("sgd", 0), ("adam", 0), ("lars", 1), ("lamb", 2)])
def test_norms_take_one_small_sum(damaged, name, sums):
    """LARS and LAMB one for all their norms, and the clipping in front of LAMB another."""
    optimizer = ShardedOptimizer(OPTIMIZERS[name], damaged, "data")
    specs = optimizer.specs(PARAMS)
    step = jax.shard_map(
        optimizer.update,
        mesh=damaged.jax_mesh("data"),
        in_specs=(P(), specs, P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    text = str(jax.make_jaxpr(step)(PARAMS, jax.eval_shape(optimizer.init, PARAMS), PARAMS))
    assert text.count("ftmesh_all_reduce[") == sums
    assert text.count("ftmesh_reduce_scatter[") == text.count("ftmesh_gather_invariant[") == 1


def at(rank, params):
    return jax.tree.map(lambda leaf: leaf[rank], params)


def one_step(optimizer, num_ranks, **options):
    """The weights that rank 7 has after a step."""

    def run(grads):
        return optimizer.update(grads, optimizer.init(FEW), FEW, **options)[0]

    return at(7, on_one_device(run)(gradients(FEW, num_ranks, 0)))


def test_padding_has_no_part_in_norms(uneven):
    """With eps 0 Adam divides zero by zero wherever there is padding; no weight may see it."""
    transformation = lamb(0.1, eps=0.0)
    params = one_step(ShardedOptimizer(transformation, uneven, "data"), 12)
    assert_close(params, unsharded(transformation, FEW, 12, steps=1)[0])


def test_norms_of_shards_alone_would_be_found_out(small, monkeypatch):
    """The fault that refusals and sums of norms are there to prevent, planted."""
    optimizer = ShardedOptimizer(lars(0.1, trust_coefficient=1.0), small, "data")
    monkeypatch.setattr(ShardedOptimizer, "_norms", lambda self, shapes: squared_norms)
    want, _ = unsharded(optimizer.transformation, FEW, 12, steps=1)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(one_step(optimizer, 12), want, rtol=1e-2)


def test_sums_and_what_is_summed_already(small):
    optimizer = ShardedOptimizer(optax.sgd(0.1), small, "data")
    total = jax.tree.map(lambda g: g.sum(axis=0), gradients(FEW, 12, 0))
    want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, FEW, total)
    assert_close(one_step(optimizer, 12, reduce="sum"), want)
    run = on_one_device(
        lambda _: optimizer.update(total, optimizer.init(FEW), FEW, reduce="none")[0]
    )
    assert_close(at(0, run(np.arange(12))), want)
    with pytest.raises(ArgumentError, match="reduce is 'mean', 'sum' or 'none', not 'max'"):
        one_step(optimizer, 12, reduce="max")


def linear(grads):
    """A loss that has these gradients."""
    return lambda params: sum(
        jnp.vdot(g, p) for g, p in zip(*map(jax.tree.leaves, (grads, params)), strict=True)
    )


class TestOverlap:
    """With sums in the backward pass."""

    @pytest.mark.parametrize("name", ["adam", "lamb"])
    def test_it_learns_the_same(self, uneven, name):
        optimizer = ShardedOptimizer(
            OPTIMIZERS[name], uneven, "data", overlap=True, bucket_bytes=1000
        )

        def run(grads):
            _, means = optimizer.value_and_grad(linear(grads))(FEW)
            return optimizer.update(means, optimizer.init(FEW), FEW)[0]

        params = on_one_device(run)(gradients(FEW, 12, 0))
        assert_close(at(4, params), unsharded(OPTIMIZERS[name], FEW, 12, steps=1)[0])

    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_the_same_step_with_and_without(self, uneven, overlap, check_vma):
        optimizer = ShardedOptimizer(OPTIMIZERS["lars"], uneven, "data", overlap=overlap)
        specs = optimizer.specs(FEW)

        def loss(params, grads):
            value = linear(jax.tree.map(lambda g: g[0], grads))(params)
            return value, value / 2

        def step(grads, state, params):
            (value, half), grads = optimizer.value_and_grad(loss, has_aux=True)(params, grads)
            params, state = optimizer.update(grads, state, params)
            return params, state, (value - 2 * half)[None]

        step = jax.shard_map(
            step,
            mesh=uneven.jax_mesh("data"),
            in_specs=(P("data"), specs, P()),
            out_specs=(P(), specs, P("data")),
            check_vma=check_vma,
        )
        params, _, nothing = jax.jit(step)(gradients(FEW, 12, 0), optimizer.init(FEW), FEW)
        assert_close(params, unsharded(OPTIMIZERS["lars"], FEW, 12, steps=1)[0])
        assert (nothing == 0).all()

    def test_a_mesh_with_another_axis(self):
        """Each of two models has weights of its own, which vary along that axis too."""
        plan = ftmesh.plan(Topology.grid("4x4", failed="2x2@0,0"), "ring")
        optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data", overlap=True)
        grads = gradients(FEW, 24, 0)

        def step(grads, params):
            grads, params = (jax.tree.map(lambda x: x[0], tree) for tree in (grads, params))
            _, means = optimizer.value_and_grad(linear(grads))(params)
            new, _ = optimizer.update(means, optimizer.init(params), params)
            return jax.tree.map(lambda p: p[None], new)

        step = jax.shard_map(
            step,
            mesh=Mesh(np.array(jax.devices()[:24]).reshape(12, 2), ("data", "model")),
            in_specs=(P(("data", "model")), P("model")),
            out_specs=P("model"),
        )
        new = jax.jit(step)(grads, jax.tree.map(lambda p: np.stack([p, p]), FEW))
        for model in range(2):
            mean = jax.tree.map(lambda g, m=model: g[m::2].sum(axis=0) / 12, grads)
            want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, FEW, mean)
            assert_close(at(model, new), want)

    @pytest.mark.parametrize(("sharded", "halves"), [(True, 1), (False, 2)])
    def test_what_travels_and_in_which_order(self, sharded, halves):
        """Read from the program of a rank: 11 rounds for each half, in both directions."""
        topology = cpu_grid("4x4", failed="2x2@0,0")
        params = {"a": np.ones((40, 40), np.float32), "b": np.ones((40, 400), np.float32)}
        parallel = Parallel.on(topology, "ring", overlap=True, bucket_bytes=1)
        optimizer = parallel.optimizer(optax.sgd(0.1), sharded=sharded, wire_dtype=jnp.bfloat16)

        def sizes(loss):
            step = jax.shard_map(
                lambda params, x: jax.tree.leaves(optimizer.value_and_grad(loss)(params, x)[1]),
                mesh=parallel.mesh,
                in_specs=(P(), P("data")),
                out_specs=P("data"),
                check_vma=False,
            )
            text = jax.jit(step).lower(params, np.ones((12, 40), np.float32)).as_text()
            permuted = re.findall(r"collective_permute.*-> tensor<([\dx]+)xbf16>", text)
            assert len(permuted) == text.count("collective_permute") == 2 * halves * 2 * 11
            elements = [np.prod([int(n) for n in size.split("x")]) for size in permuted]
            return elements[: len(elements) // 2], elements[len(elements) // 2 :]

        # The gradient of the second layer is there first.
        chained = sizes(lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2))
        assert min(chained[0]) > max(chained[1])
        chained = sizes(lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p["b"]) @ p["b"].T @ p["a"])))
        assert min(chained[1]) > max(chained[0])

    def test_means_are_not_averaged_again(self, small, uneven):
        ours, other = (
            ShardedOptimizer(optax.sgd(0.1), plan, "data", overlap=True) for plan in (small, uneven)
        )
        want = one_step(ShardedOptimizer(optax.sgd(0.1), small, "data"), 12)
        assert_close(one_step(ours, 12), want)  # a rank's own gradients, not means

        def step(maker, optimizer, **options):
            def run(grads):
                _, means = maker.value_and_grad(linear(grads))(FEW)
                return optimizer.update(means, optimizer.init(FEW), FEW, **options)[0]

            return at(7, on_one_device(run)(gradients(FEW, 12, 0)))

        assert_close(step(ours, ours), want)
        with pytest.raises(ArgumentError, match="sharded for the owners of another plan"):
            step(other, ours)
        with pytest.raises(ArgumentError, match="means already, and reduce is 'sum'"):
            step(ours, ours, reduce="sum")
        plain = Parallel.on(Topology.grid("4x4", failed="2x2@0,0"), "ring", overlap=True).optimizer(
            optax.sgd(0.1), sharded=False
        )
        assert_close(step(plain, plain), want)
        assert_close(step(plain, ours), want)
        with pytest.raises(ArgumentError, match="are sharded, and this optimizer's are whole"):
            step(ours, plain)

    def test_several_dtypes_idle_devices_and_unused_leaves(self):
        plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
        optimizer = ShardedOptimizer(optax.sgd(0.5), plan, "data", overlap=True)
        params = {"wide": np.ones((9, 5), np.float32), "half": np.ones(77, jnp.bfloat16),
                  "unused": np.ones(3, np.float32)}  # fmt: skip

        def run(rank):
            def loss(params):
                return rank * (params["wide"].sum() + params["half"].sum().astype(jnp.float32))

            _, means = optimizer.value_and_grad(loss)(params)
            return optimizer.update(means, optimizer.init(params), params)[0]

        live = plan.program.live
        new = at(live, on_one_device(run)(12 * np.arange(16, dtype=np.float32) % 24))
        assert (live % 2).sum() == 6
        assert (new["wide"] == 1 - 6 / 2).all()
        assert (new["half"] == 1 - 6 / 2).all()
        assert (new["unused"] == 1).all()


def test_two_devices_per_chip():
    failed = frozenset({(0, 0), (1, 0), (0, 1), (1, 1)})
    topology = Topology((4, 4), (False, False), failed, devices_per_chip=2)
    optimizer = ShardedOptimizer(OPTIMIZERS["lars"], ftmesh.plan(topology, "ring"), "data")
    assert_close(one_step(optimizer, 24), unsharded(OPTIMIZERS["lars"], FEW, 24, steps=1)[0])


def test_bf16_on_the_wire_buckets_and_norms_on_a_plan_of_their_own(small, uneven):
    """A step of LARS is far smaller than its weights: what bf16 rounds off is hardly seen."""
    optimizer = ShardedOptimizer(
        lars(0.1), small, "data", wire_dtype=jnp.bfloat16, bucket_bytes=1000, norm_plan=uneven
    )
    assert_close(one_step(optimizer, 12), unsharded(lars(0.1), FEW, 12, steps=1)[0], rtol=2e-3)


def test_parameters_of_several_dtypes(small):
    params = {"wide": np.ones((9, 5), np.float32), "half": np.ones(77, jnp.bfloat16)}
    optimizer = ShardedOptimizer(optax.sgd(0.5), small, "data")

    def run(rank):
        grads = jax.tree.map(lambda p: jnp.full_like(p, rank), params)
        return optimizer.update(grads, optimizer.init(params), params, reduce="sum")[0]

    new = on_one_device(run)(np.arange(12))
    for name, leaf in new.items():
        assert leaf.dtype == params[name].dtype
        assert (leaf == 1 - 66 / 2).all()


def test_idle_devices_learn_nothing():
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
    optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data")
    grads, live = gradients(FEW, 16, 0), plan.program.live
    new = on_one_device(lambda g: optimizer.update(g, optimizer.init(FEW), FEW)[0])(grads)
    want = jax.tree.map(lambda p, g: p - np.float32(0.1) * g[live].mean(axis=0), FEW, grads)
    for rank in range(16):
        if rank in live:
            assert_close(at(rank, new), want)
        else:
            assert np.isnan(new["kernel"][rank]).all()


class TestRefusals:
    def test_a_state_of_other_owners(self, small, uneven):
        ours, other = (ShardedOptimizer(optax.adam(0.1), plan, "data") for plan in (small, uneven))

        def step(make):
            run = on_one_device(lambda g: ours.update(g, make(FEW), FEW)[0])
            return jax.eval_shape(run, gradients(FEW, 12, 0))

        step(ours.init)
        for state in (other.init, ours.transformation.init):
            with pytest.raises(ArgumentError, match="not sharded for the owners of this plan"):
                step(state)

    def test_a_schedule_without_owners(self, uneven):
        schedule = uneven.schedule
        nobody = dataclasses.replace(
            uneven, schedule=dataclasses.replace(schedule, owner=np.full_like(schedule.owner, -1))
        )
        with pytest.raises(CollectiveError, match="'row_pair' has no reduce-scatter half, so nobo"):
            ShardedOptimizer(optax.adam(0.1), nobody, "data")

    def test_gradients_that_jax_has_summed(self, small):
        optimizer = ShardedOptimizer(optax.sgd(0.1), small, "data")
        step = jax.shard_map(
            lambda params: optimizer.update(params, optimizer.init(params), params)[0],
            mesh=small.jax_mesh("data"),
            in_specs=P(),
            out_specs=P(),
        )
        with pytest.raises(CollectiveError, match="is the same on every device already"):
            jax.eval_shape(step, FEW)

    def test_other_gradients_than_parameters(self, small):
        optimizer = ShardedOptimizer(optax.sgd(0.1), small, "data")
        with pytest.raises(ArgumentError, match="the structure and shapes of the parameters"):
            on_one_device(lambda g: optimizer.update(g, optimizer.init(FEW), FEW)[0])(
                {"kernel": np.zeros((12, 3))}
            )
