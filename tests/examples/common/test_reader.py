"""The reader: processes share the examples of every batch."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from examples.common import reader
from examples.common.reader import Reader, shuffled
from examples.common.records import Records, find_shards, write_records
from ftmesh.errors import ArgumentError, DataError
from ftmesh.layout.batch_shares import BatchShares
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.topology import Topology

TWELVE = Topology.grid("4x4", failed="2x2@2,0")

# Which process has the devices of each of the twelve ranks.
DIVISIONS = {
    "one process": [0] * 12,
    "equal": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
    "unequal": [0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 3],
    "one without ranks": [0, 0, 0, 0, 0, 1, 1, 1, 3, 3, 3, 3],
    "not contiguous": [0, 1, 2, 3, 3, 2, 1, 0, 1, 1, 0, 2],
}


class Batch(NamedTuple):
    numbers: np.ndarray


class Batches(reader.Batches[Batch]):
    """Records that are numbers; counts what is read."""

    def __init__(self, records, **settings):
        super().__init__(len(records), **settings)
        self.records, self.read = records, []

    def padding(self, num_rows):
        return Batch(np.full(num_rows, -1))

    def example(self, index, position):
        number = int(self.records[index])
        self.read.append(number)
        return (number,)

    def name(self, index):
        return self.records.name(index)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hundred and two numbers, in shards of 40, 0, 61 and 1."""
    folder = tmp_path_factory.mktemp("records")
    for shard, numbers in enumerate([range(40), (), range(40, 101), [101]]):
        write_records(folder / f"train-{shard:05}-of-00004", (b"%d" % i for i in numbers))
    return folder


def opened(folder):
    return Records(find_shards(folder, "train-*"))


def processes(folder, division, batch, *, num_steps=None, with_idle=False):
    """The batches of each process, with the rows of `DataParallel.local_rows`."""
    positions = BatchShares.for_ranks(Ranks(TWELVE, with_idle), batch).positions()
    owners = np.array(DIVISIONS[division])
    if with_idle:  # the devices of failed chips are some process's, too
        owners = np.concatenate([owners, [0, 1, 2, 3]])
    assert len(owners) == len(positions)
    return [
        Batches(
            opened(folder),
            batch=batch,
            num_steps=num_steps,
            seed=5,
            rows=positions[owners == process].reshape(-1),
        )
        for process in range(4)
    ]


def read_step(ours, step):
    """What all processes read for a step."""
    for each in ours:
        each.read.clear()
        ((numbers,), damaged) = each[step]
        assert sorted(numbers[numbers >= 0]) == sorted(each.read)
        assert (damaged == -1).all()
    return [number for each in ours for number in each.read]


@pytest.mark.parametrize("with_idle", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("batch", [12, 17, 34])
def test_in_training(folder, division, batch, with_idle):
    num_steps = 2 * 102 // batch  # whole epochs
    ours = processes(folder, division, batch, num_steps=num_steps, with_idle=with_idle)
    seen = Counter()
    for step in range(num_steps):
        read = read_step(ours, step)
        places = np.arange(step * batch, (step + 1) * batch)
        assert sorted(read) == sorted(shuffled(places, 102, seed=5))
        if places[0] // 102 == places[-1] // 102:
            assert len(set(read)) == batch
        seen.update(read)
        if places[-1] % 102 == 101:  # the end of an epoch
            assert set(seen.values()) == {places[-1] // 102 + 1}
    assert len(seen) == 102


@pytest.mark.parametrize("with_idle", [False, True])
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("batch", [12, 17, 40])
def test_in_evaluation(folder, division, batch, with_idle):
    ours = processes(folder, division, batch, with_idle=with_idle)
    steps = [read_step(ours, step) for step in range(len(ours[0]))]
    sizes = [len(step) for step in steps]
    assert sizes == [min(batch, 102 - batch * step) for step in range(len(steps))]
    assert sorted(number for step in steps for number in step) == list(range(102))


def test_rows_are_in_the_order_of_ranks(folder):
    positions = BatchShares.for_ranks(TWELVE, 17).positions()
    whole = Batches(opened(folder), batch=17, num_steps=3, seed=5)[2][0].numbers
    for each, process in zip(
        processes(folder, "not contiguous", 17, num_steps=3), range(4), strict=True
    ):
        rows = positions[np.array(DIVISIONS["not contiguous"]) == process].reshape(-1)
        expected = np.where(rows < 0, -1, whole[rows])
        np.testing.assert_array_equal(each[2][0].numbers, expected)


def test_a_process_without_ranks_reads_nothing(folder):
    batches = processes(folder, "one without ranks", 12, num_steps=4)[2]
    with Reader(batches) as reader:
        assert [len(batch.numbers) for batch in reader] == [0] * 4
    assert batches.read == []


def test_a_reader_starts_anywhere(folder):
    batches = Batches(opened(folder), batch=10, num_steps=40, seed=5)
    with Reader(batches, first_step=37) as reader:
        found = np.concatenate([batch.numbers for batch in reader])
    np.testing.assert_array_equal(found, shuffled(np.arange(370, 400), 102, seed=5))


def test_an_epoch_of_fewer_examples_than_a_batch(folder):
    batches = Batches(opened(folder), batch=500, num_steps=1)
    (numbers,), _ = batches[0]
    assert sorted(Counter(numbers.tolist()).values()) == [4] * 10 + [5] * 92


class TestDamagedExamples:
    """They are left out while they are few."""

    @pytest.fixture
    def batches(self, tmp_path):
        """A data set of `number` examples, some with a flipped bit."""

        def make(num_examples, damaged, **settings):
            path = tmp_path / "train-00000-of-00001"
            write_records(path, (b"%06d" % i for i in range(num_examples)))
            raw = bytearray(path.read_bytes())
            for index in damaged:
                raw[22 * index + 12] ^= 1
            path.write_bytes(raw)
            return Batches(Records([path]), **settings)

        return make

    @pytest.mark.parametrize("batch", [1, 4, 40])
    def test_all_of_them(self, batches, batch):
        read = Reader(batches(40, range(40), batch=batch, num_steps=100))
        with pytest.raises(DataError, match=r"are damaged.*record \d+: the data does not match"):
            list(read)
        read.close()

    @pytest.mark.parametrize("num_steps", [1, 3])
    def test_all_of_a_short_run(self, batches, num_steps):
        made = batches(1000, range(1000), batch=2, num_steps=num_steps)
        with (
            pytest.raises(DataError, match=f"all of the first {2 * num_steps} examples are damag"),
            Reader(made) as reader,
        ):
            list(reader)

    def test_a_share(self, batches):
        with Reader(batches(2000, range(0, 2000, 100), batch=100)) as reader:
            list(reader)
        assert len(reader.skipped) == 20
        with (
            pytest.raises(DataError, match=r"21 examples are damaged, and at most 20 .*--max-dam"),
            Reader(batches(2000, [*range(0, 2000, 100), 7], batch=100)) as reader,
        ):
            list(reader)
        with Reader(batches(2000, range(0, 2000, 20), batch=100), max_damaged=0.1) as reader:
            list(reader)
        assert len(reader.skipped) == 100

    @pytest.mark.parametrize(("num_examples", "allowed"), [(5, 2), (15, 7), (50, 10)])
    def test_a_few_of_a_small_set(self, batches, num_examples, allowed):
        with Reader(batches(num_examples, range(allowed), batch=num_examples)) as reader:
            list(reader)
        with (
            pytest.raises(DataError, match=f"and at most {allowed} may be left out"),
            Reader(batches(num_examples, range(allowed + 1), batch=num_examples)) as reader,
        ):
            list(reader)


def test_a_batch_that_does_not_fit_in_memory(folder):
    Batches(opened(folder), batch=10, num_steps=1).check_memory()
    large = Batches(opened(folder), batch=10, num_steps=1)
    large.padding = lambda num_rows: Batch(np.broadcast_to(np.zeros(1), (num_rows, 2**50)))
    with pytest.raises(ArgumentError, match=r"batches of 10 examples would take .*smaller --batch"):
        large.check_memory()
