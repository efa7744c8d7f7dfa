"""What each rank of a Pallas kernel does, recorded from the kernel's own code.

The kernel branches only on its tables, so a rank's program is one sequence of actions. To obtain
it, the source of `ftmesh.execute.pallas.kernel` runs once per rank as plain Python: the names that
it takes from JAX (`pl`, `pltpu`, `lax`, `jnp`) are replaced by those below, which record actions.
So faults are planted as in the interpreter, by replacing methods of `KernelLane` or `KernelRank`.

| in the kernel                               | action                                           |
|---------------------------------------------|--------------------------------------------------|
| `pl.semaphore_wait`, `make_async_copy.wait` | `Wait`: for a number, or for as many bytes       |
| `pl.semaphore_signal`                       | `Signal`, of a semaphore of a partner            |
| `make_async_copy.start`                     | `Copy` with one end: it is done                  |
| `make_async_remote_copy.start`              | `Copy` with two ends: it has left; it has landed |
| reads and assignments of slots (add, cast)  | `Compute`, a sum of what is in some cells        |
| a read of the table's page                  | `Compute` that writes nothing                    |
| the start and the end of the kernel         | `Enter` and `Exit`                               |

A cell is one row of a memory: of the buffer, of a slot, or a page of the table. `tile` is one row.
Tables are those of `pallas_tables`, computed with NumPy: `test_pallas_tables` checks them in JAX.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy as np

from ftmesh.execute import pallas, pallas_rank, pallas_tables
from ftmesh.execute.pallas_rank import KernelSpec
from ftmesh.execute.pallas_tables import partner_table, rank_headers, rank_pages, split_loops

AXIS = "data"
BARRIER = "barrier"  # its semaphore outlives the kernel; all others are the kernel's


@dataclass(frozen=True)
class Wait:
    semaphore: tuple
    number: int


@dataclass(frozen=True)
class Signal:
    semaphore: tuple
    number: int


@dataclass(frozen=True)
class Copy:
    source: tuple
    destination: tuple
    left: tuple | None  # semaphore of the sender, if remote
    landed: tuple
    size: int  # what is added to semaphores


@dataclass(frozen=True)
class Compute:
    terms: tuple  # of cells, row by row
    written: tuple


@dataclass(frozen=True)
class Enter:
    """The rank's memory and semaphores were somebody else's until now."""


@dataclass(frozen=True)
class Exit:
    """They are somebody else's from now on."""


class Recorder:
    """The actions of one rank."""

    def __init__(self, rank):
        self.rank, self.actions = rank, []

    def add(self, action):
        is_lookup = isinstance(action, Compute) and not action.written
        if not (is_lookup and self.actions[-1] == action):
            self.actions.append(action)


class Memory:
    """A reference to rows of a memory of a rank."""

    def __init__(self, recorder, name, dtype, index=(), rows=None):
        self.recorder, self.name, self.dtype = recorder, name, np.dtype(dtype)
        self.index, self.rows = index, rows

    @property
    def at(self):
        return Indexer(self._at)

    def _at(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if isinstance(index[-1], slice):
            rows = range(int(index[-1].start), int(index[-1].stop))
            return Memory(self.recorder, self.name, self.dtype, _ints(index[:-1]), rows)
        return Memory(self.recorder, self.name, self.dtype, _ints(index), range(1))

    def cells(self, rank=None):
        rank = self.recorder.rank if rank is None else rank
        return tuple((rank, self.name, *self.index, row) for row in self.rows)

    @property
    def size(self):
        return len(self.rows) * self.dtype.itemsize

    def __getitem__(self, rows):
        return Value((self.cells()[rows],), self.dtype)

    def __setitem__(self, rows, value):
        self.recorder.add(Compute(value.terms, self.cells()[rows]))


class Pages(Memory):
    """The two pages of the table in SMEM; reads give the words of what was copied there last."""

    def __init__(self, recorder, words):
        super().__init__(recorder, "page", np.int32)
        self.words, self.held = words, {}

    def __getitem__(self, index):
        page, now, word = _ints(index)
        self.recorder.add(Compute((self._at(page).cells(),), ()))
        return self.words[self.held[page], now, word]


@dataclass(frozen=True)
class Value:
    """What was read from some cells, row by row, or the sum of such."""

    terms: tuple
    dtype: np.dtype

    def astype(self, dtype):
        return Value(self.terms, np.dtype(dtype))

    def __add__(self, other):
        return Value(self.terms + other.terms, self.dtype)


class Indexer:
    """An object whose items are the results of a function."""

    def __init__(self, get):
        self.get = get

    def __getitem__(self, index):
        return self.get(index)


def _ints(index):
    return tuple(int(i) for i in (index if isinstance(index, tuple) else (index,)))


def _semaphores(recorder, name):
    return SimpleNamespace(at=Indexer(lambda index: (recorder.rank, name, *_ints(index))))


def record_rank(spec, header, words, rank):
    """Run the kernel as one rank: its actions."""
    recorder = Recorder(rank)
    page = Pages(recorder, words)

    def local_copy(source, destination, semaphore):
        def start():
            if destination.name == "page":
                page.held[destination.index[0]] = source.index[0]
            recorder.add(
                Copy(source.cells(), destination.cells(), None, semaphore, destination.size)
            )

        def wait():
            recorder.add(Wait(semaphore, destination.size))

        return SimpleNamespace(start=start, wait=wait)

    def remote_copy(src_ref, dst_ref, send_sem, recv_sem, device_id):
        peer = int(device_id[AXIS])
        landed = (peer, *recv_sem[1:])
        copy = Copy(src_ref.cells(), dst_ref.cells(peer), send_sem, landed, dst_ref.size)
        return SimpleNamespace(start=lambda: recorder.add(copy))

    def signal(semaphore, number, device_id):
        if number:
            recorder.add(Signal((int(device_id[AXIS]), *semaphore[1:]), int(number)))

    def fori_loop(first, end, body, carry):
        for i in range(first, end):
            carry = body(np.int64(i), carry)
        return carry

    fake_pl = SimpleNamespace(
        when=lambda condition: lambda act: act() if condition else None,
        ds=lambda start, size: slice(start, start + size),
        multiple_of=lambda x, _: x,
        semaphore_signal=signal,
        semaphore_wait=lambda sem, number: recorder.add(Wait(sem, int(number))),
    )
    fake_pltpu = SimpleNamespace(
        get_barrier_semaphore=lambda: (rank, BARRIER),
        make_async_copy=local_copy,
        make_async_remote_copy=remote_copy,
    )
    fake_lax = SimpleNamespace(
        rem=lambda x, y: np.int64(x % y), div=lambda x, y: np.int64(x // y), fori_loop=fori_loop
    )
    dtype, wire = spec.dtype, spec.wire
    memories = [("arrived", wire), ("own", dtype), ("staged", dtype), ("out", wire)]
    with (
        mock.patch.multiple(pallas_rank, pl=fake_pl, pltpu=fake_pltpu, lax=fake_lax, jnp=np),
        mock.patch.multiple(pallas, lax=fake_lax),
    ):
        recorder.add(Enter())
        pallas.kernel(
            spec,
            header,
            Memory(recorder, "pages", np.int32),
            None,
            Memory(recorder, "buffer", dtype),
            page,
            *(Memory(recorder, name, kind) for name, kind in memories),
            (rank, "page_arrived"),
            _semaphores(recorder, "done"),
            _semaphores(recorder, "credits"),
        )
        recorder.add(Exit())
    return recorder.actions


def record(
    program, loops=None, *, chunk_rows=1, max_rows=1, wire=np.float32, edit_words=lambda words: None
):
    """The actions of all ranks in some loops of a program, or in all.

    A chunk has `chunk_rows` rows, and a piece `max_rows` at most. `edit_words` may change the
    words ``[rank, page, round, word]`` of the tables.
    """
    loops = program.loops if loops is None else loops
    splits = split_loops(loops, chunk_rows=chunk_rows, tile=1, max_rows=max_rows)
    headers = rank_headers(loops, program.num_ranks)
    spec = KernelSpec(
        axis_name=AXIS,
        splits=splits,
        chunk_rows=chunk_rows,
        tile=1,
        dtype=np.dtype(np.float32),
        wire=np.dtype(wire),
        num_partners=partner_table(loops, program.num_ranks).shape[1],
    )
    with mock.patch.multiple(pallas_tables, jnp=np):
        words = np.stack([rank_pages(splits, header, spec.num_partners) for header in headers])
    edit_words(words)
    return [
        record_rank(spec, headers[rank], words[rank], rank) for rank in range(program.num_ranks)
    ]
