"""Each example is used once per epoch, by any number of processes, and padding is masked."""

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import elastic, pad_batch
from ftmesh.errors import ArgumentError


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 10, 13])
def test_each_example_once_in_an_epoch(batch_size, shuffle):
    sampler = elastic.StepSampler(10, batch_size, num_epochs=3, seed=5, shuffle=shuffle)
    used = np.concatenate(list(sampler))
    assert len(sampler) == 30 // batch_size
    assert len(used) == len(sampler) * batch_size
    for epoch in range(len(used) // 10):
        assert sorted(used[10 * epoch : 10 * epoch + 10]) == list(range(10))


def test_the_order_depends_on_seed_and_epoch_alone():
    first, same, other = (elastic.StepSampler(50, 25, num_epochs=2, seed=s) for s in (1, 1, 2))
    for step in reversed(range(4)):
        np.testing.assert_array_equal(first[step], same[step])
    assert (first[0] != other[0]).any()
    assert (np.concatenate([first[0], first[1]]) != np.concatenate([first[2], first[3]])).any()


@pytest.mark.parametrize("axes", [(8,), (2, 4), (4, 2)])
def test_rows_of_a_sharding(axes):
    """In one process these are all rows, once each, also where devices have the same ones."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(axes), ("data", "model")[: len(axes)])
    sampler = elastic.StepSampler(100, 24).for_sharding(NamedSharding(mesh, P("data", None)))
    assert sampler.num_rows == 24
    np.testing.assert_array_equal(sampler[2], elastic.StepSampler(100, 24)[2])
    assert sampler.mask.all()


def test_padding_is_that_of_pad_batch():
    mesh = Mesh(np.array(jax.devices()[:7]), ("data",))
    whole = elastic.StepSampler(100, 24)
    sampler = whole.for_sharding(NamedSharding(mesh, P("data")))
    padded, mask = pad_batch(whole[1], 7)
    assert sampler.num_rows == 28
    np.testing.assert_array_equal(sampler[1], padded)
    np.testing.assert_array_equal(sampler.mask, mask)


def test_processes_have_parts_of_the_batch():
    """Half of the rows, as the devices of a process have them, in the order of the batch."""
    sampler = elastic.StepSampler(100, 24)
    parts = []
    for rows in (np.r_[0:6, 18:24], np.r_[6:18]):
        part = elastic.StepSampler(100, 24)
        part.rows = rows
        parts.append(part[3])
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(sampler[3]))


def test_as_a_source_of_grain():
    sampler = elastic.StepSampler(96, 24, seed=3)
    data = np.arange(96) ** 2
    dataset = grain.MapDataset.source(sampler).map(lambda rows: data[rows])
    assert len(dataset) == 4
    np.testing.assert_array_equal(dataset[2], data[sampler[2]])
    rest = list(dataset[2:].to_iter_dataset())  # a run that continues from step 2
    assert len(rest) == 2
    np.testing.assert_array_equal(rest[1], data[sampler[3]])


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0)])
def test_bad_sizes(sizes):
    with pytest.raises(ArgumentError, match="give 1 or more"):
        elastic.StepSampler(*sizes)


def test_a_batch_that_is_never_full():
    """The run would end at once, as if it were done."""
    assert len(elastic.StepSampler(10, 20, num_epochs=2)) == 1
    with pytest.raises(ArgumentError, match="batch_size is 21, and 2 epochs have 20 examples"):
        elastic.StepSampler(10, 21, num_epochs=2)
    with pytest.raises(ArgumentError, match="seed is -1: give 0 or more"):
        elastic.StepSampler(10, 2, seed=-1)


def test_steps_outside_of_the_run():
    with pytest.raises(IndexError, match="step 4: there are 4"):
        elastic.StepSampler(96, 24)[4]
