"""A model of the Pallas kernel's semaphores, slots and copies, checked in every order of events.

The ranks' actions are recorded from the kernel itself: see `kernel_recorder`. What the model adds:

- A rank does its actions one after another, at any speed. A wait blocks until its semaphore has
  the number, and takes it off.
- A copy reads its source from its start until it has left, and writes its destination from its
  start until it has landed; then the semaphore of that end is increased. Each end comes at any
  later time, in any order with all others, also those of the same two ranks and of the same copy.
- An access is open from its begin to its end, also one by the rank's own code. Two open accesses to
  a cell, of which one writes, are a *race*: so a slot must not be written before it has been read.
- Until a rank enters the kernel and after it leaves, its memory and semaphores belong to others:
  touching them is a race too. Only the semaphore of the barrier is always there.
- What is in a cell is how often each rank has contributed to it.

A *deadlock* is a state in which nothing can happen and some rank has not finished. At the end every
semaphore must be zero. Every row must have each contribution once: at all ranks, or after a
reduce-scatter at its owner. An all-gather starts from that, with nothing at other ranks.

Why `prove` covers every order of events. Only its own rank waits on a semaphore, and no rank's
actions depend on data. So what can happen still can after anything else has happened; if two sets
of events are each possible, so is their union. Therefore all orders have the same events and the
same end, and one run shows whether there is a deadlock. If in some order b begins while a is open,
it also does if a is held open for ever and all else goes on as far as it can. So `prove` holds up
each event of one run in turn, from the moment it could happen, and runs all others. `explore` does
not use this argument: it goes through all states, with every order of the events that other ranks
can notice. Both must agree where `explore` is feasible.

Not modelled: that the compiler keeps the order of a rank's actions; the routes and the bandwidth of
copies; links that lose or corrupt data; the bits of sums; what ranks do between two calls. A wait
takes no time. The end of a copy and the increase of its semaphore are one event.
"""

import heapq
import random
from collections import Counter
from dataclasses import dataclass

from tests.support.kernel_recorder import BARRIER, Compute, Copy, Enter, Exit, Signal, Wait

WAIT, SIGNAL, COPY, COMPUTE, ENTER, EXIT = range(6)
WRITING = 1 << 20  # in a count of open accesses: one that writes
BITS = 16  # of a rank in a count of contributions


class RaceError(Exception):
    """Two accesses to a cell may be open at once."""


class DeadlockError(Exception):
    """Nothing can happen, and some ranks have not finished."""


class EndError(Exception):
    """A semaphore is not zero at the end, or a sum is wrong."""


@dataclass
class State:
    pcs: list  # by rank: the next action
    levels: list  # by semaphore
    opened: list  # by cell: open accesses
    contents: list | None = None  # by cell

    def copy(self):
        return State(self.pcs[:], self.levels[:], self.opened[:])


@dataclass
class Model:
    """The recorded actions of all ranks, with numbers for cells and semaphores."""

    recorded: list  # by rank
    calls: int = 1  # of the kernel, one after another
    checks: str = "all_reduce"  # or "reduce_scatter" or "all_gather": whose sums; "" for none
    owners: tuple = ()  # by row: the rank that has its sum between the two
    live: tuple = ()  # the ranks that contribute; all unless given

    def __post_init__(self):
        self.cells, self.semaphores = {}, {}
        self.code = [
            [self._encode(rank, action) for _ in range(self.calls) for action in actions]
            for rank, actions in enumerate(self.recorded)
        ]
        self.cell_names, self.semaphore_names = list(self.cells), list(self.semaphores)
        self.owner = [name[0] for name in self.semaphore_names]
        self.num_ranks = len(self.code)
        self.live = self.live or tuple(range(self.num_ranks))

    def _cells(self, names):
        return tuple(self.cells.setdefault(name, len(self.cells)) for name in names)

    def _inside(self, rank):
        return self._cells([(rank, "kernel")])  # in use by others until it enters

    def _semaphore(self, name):
        return self.semaphores.setdefault(name, len(self.semaphores))

    def _encode(self, rank, action):
        match action:
            case Wait(semaphore, number):
                assert semaphore[0] == rank  # nothing that can happen is prevented
                return WAIT, self._semaphore(semaphore), number
            case Signal(semaphore, number):
                inside = () if semaphore[1] == BARRIER else self._inside(semaphore[0])
                return SIGNAL, inside, (), self._semaphore(semaphore), number
            case Copy(source, destination, left, landed, size):
                src, dst = self._cells(source), self._cells(destination)
                inside, inside_dst = self._inside(rank), self._inside(destination[0][0])
                landing = self._semaphore(landed), size
                if left is None:
                    return COPY, ((src + inside, dst, *landing),), src, dst
                leaving = (src + inside, (), self._semaphore(left), size)
                return COPY, (leaving, (inside_dst, dst, *landing)), src, dst
            case Compute(terms, written):
                terms, written = [self._cells(cells) for cells in terms], self._cells(written)
                read = tuple({cell for cells in terms for cell in cells} - set(written))
                return COMPUTE, read + self._inside(rank), written, terms
            case Enter():
                return ENTER, (), self._inside(rank)
            case Exit():
                return EXIT, (), self._inside(rank)

    def initial(self, *, with_contents=False):
        state = State([0] * self.num_ranks, [0] * len(self.semaphores), [0] * len(self.cells))
        if with_contents:
            state.contents = [
                self._first(rank, index[-1]) if name == "buffer" else 0
                for rank, name, *index in self.cell_names
            ]
        for code in self.code:
            for cell in code[0][2]:  # it is outside
                state.opened[cell] = WRITING
        return state

    @property
    def _whole(self):
        """The contents of a row that has each contribution once."""
        return sum(1 << BITS * rank for rank in self.live)

    def _first(self, rank, row):
        """What is in a row of a rank's buffer before the first call."""
        if self.checks == "all_gather":
            return self._whole if self.owners[row] == rank else 0
        return 1 << BITS * rank

    def _last(self, rank, row):
        """What must be there after the last call; None for anything."""
        is_undefined = self.checks == "reduce_scatter" and self.owners[row] != rank
        if not self.checks or is_undefined:
            return None
        return len(self.live) ** (self.calls - 1) * self._whole

    def begin(self, state, read, written, rank):
        """Open accesses; two that must not be open at once are a race."""
        opened = state.opened
        for cell in read:
            if opened[cell] >= WRITING:
                self._race(state, cell, rank)
            opened[cell] += 1
        for cell in written:
            if opened[cell]:
                self._race(state, cell, rank)
            opened[cell] = WRITING

    def _race(self, state, cell, rank):
        action = self._action(rank, state.pcs[rank])
        raise RaceError(f"rank {rank}, {action}: {self.cell_names[cell]} is in use")

    def _action(self, rank, pc):
        return self.recorded[rank][pc % len(self.recorded[rank])]

    def end(self, state, read, written):
        for cell in read:
            state.opened[cell] -= 1
        for cell in written:
            state.opened[cell] -= WRITING

    def compute(self, state, action):
        _, _, written, terms = action
        if state.contents is not None and written:
            for cell, *read in zip(written, *terms, strict=True):
                state.contents[cell] = sum(state.contents[each] for each in read)

    def check_end(self, state):
        """Raise unless all have finished, all semaphores are zero and all sums are right."""
        stuck = {
            rank: self._action(rank, pc)
            for rank, pc in enumerate(state.pcs)
            if pc < len(self.code[rank])
        }
        if stuck:
            raise DeadlockError(f"{len(stuck)} ranks do not finish: {stuck}")
        for name, level in zip(self.semaphore_names, state.levels, strict=True):
            if level:
                raise EndError(f"{name} is {level} at the end")
        for (rank, name, *index), content in zip(
            self.cell_names, state.contents or (), strict=state.contents is not None
        ):
            want = self._last(rank, index[-1]) if name == "buffer" else None
            if want not in (None, content):
                raise EndError(f"rank {rank}, row {index[-1]} has contributions {content:#x}")

    # One run with every event held up in turn ----------------------------------------------------

    def prove(self, *, is_held=lambda rank, pc: True):
        """Check every order of events; the numbers of events held up, and of events run meanwhile.

        `is_held` may choose whose events are held up: then it is no proof.
        """
        counts = Counter()
        state = self.initial(with_contents=True)

        def hold(frozen, end=None):
            """Run on without the next event of a rank, or without an end of its next copy."""
            if not is_held(frozen, state.pcs[frozen]):
                return
            other = state.copy()
            if end is not None:
                for each in self.code[frozen][state.pcs[frozen]][1]:
                    if each is not end:
                        self.end(other, *each[:2])
                        other.levels[each[2]] += each[3]
                other.pcs[frozen] += 1
            counts["held"] += 1
            counts["run"] += self.settle(other, frozen if end is None else None)

        counts["events"] = self.settle(state, hold=hold)
        self.check_end(state)
        return counts

    def settle(self, state, frozen=None, hold=None):
        """Run all ranks but `frozen` as far as they can, with copies that take no time."""
        pcs, levels, ready = state.pcs, state.levels, list(range(self.num_ranks))
        contents, owner, num_events = state.contents, self.owner, 0
        while ready:
            rank = ready.pop()
            if rank == frozen:
                continue
            code = self.code[rank]
            while pcs[rank] < len(code):
                action = code[pcs[rank]]
                kind = action[0]
                if kind == WAIT:
                    if levels[action[1]] < action[2]:
                        break
                    levels[action[1]] -= action[2]
                elif kind in (SIGNAL, COMPUTE):
                    self.begin(state, *action[1:3], rank)
                    if hold and action[1 if kind == SIGNAL else 2]:
                        hold(rank)
                    self.end(state, *action[1:3])
                    if kind == COMPUTE:
                        self.compute(state, action)
                    else:
                        levels[action[3]] += action[4]
                        ready.append(owner[action[3]])
                elif kind == COPY:
                    for end in action[1]:
                        self.begin(state, end[0], end[1], rank)
                    for end in action[1] if hold else ():
                        hold(rank, end)
                    if contents is not None:
                        for src, dst in zip(action[2], action[3], strict=True):
                            contents[dst] = contents[src]
                    for end in action[1]:
                        self.end(state, end[0], end[1])
                        levels[end[2]] += end[3]
                        ready.append(owner[end[2]])
                    num_events += len(action[1])
                elif kind == ENTER:
                    if hold:
                        hold(rank)
                    self.end(state, (), action[2])
                else:
                    self.begin(state, (), action[2], rank)
                pcs[rank] += 1
                num_events += 1
        return num_events

    # All states -------------------------------------------------------------------------------

    def explore(self, *, max_states, eager_local=False):
        """Go through all states: their number.

        What only opens accesses happens at once, since then more of them are open together; what
        ends accesses happens in every order. With `eager_local`, so do only the landings of remote
        copies, and what the rank's code does with slots and credits: copies within a rank end at
        once, and so do the ends at the sender.
        """
        state, pending, bits = self.initial(), set(), {}
        self._open_all(state, pending, eager_local, range(self.num_ranks))
        stack, seen = [(state, pending, 0)], {0}  # a state is the set of what has ended, in bits
        while stack:
            state, pending, ended = stack.pop()
            if not pending:
                self.check_end(state)
            for event in pending:
                key = ended | bits.setdefault(event, 1 << len(bits))
                if key not in seen:
                    seen.add(key)
                    if len(seen) > max_states:
                        raise OverflowError(f"more than {max_states} states")
                    after, others = state.copy(), pending - {event}
                    woken = self._finish(after, *event)
                    self._open_all(after, others, eager_local, woken)
                    stack.append((after, others, key))
        return len(seen)

    def _finish(self, state, rank, pc, number):
        """End an access, and do what follows at once; the ranks that may go on."""
        action = self.code[rank][pc]
        if action[0] == COPY:
            read, written, semaphore, size = action[1][number]
            self.end(state, read, written)
            state.levels[semaphore] += size
            return [self.owner[semaphore]]
        state.pcs[rank] += 1
        self.end(state, *action[1:3])
        if action[0] == SIGNAL:
            state.levels[action[3]] += action[4]
            return [rank, self.owner[action[3]]]
        return [rank]

    def _open_all(self, state, pending, eager_local, ranks):
        """Let ranks go on until they wait, or access what others may notice."""
        ranks = list(ranks)
        while ranks:
            rank = ranks.pop()
            code = self.code[rank]
            while (pc := state.pcs[rank]) < len(code):
                action = code[pc]
                kind = action[0]
                if (rank, pc, None) in pending:
                    break
                if kind == WAIT:
                    if state.levels[action[1]] < action[2]:
                        break
                    state.levels[action[1]] -= action[2]
                elif kind == COPY:
                    for end in action[1]:
                        self.begin(state, end[0], end[1], rank)
                    for number, end in enumerate(action[1]):
                        if eager_local and self.owner[end[2]] == rank:
                            ranks += self._finish(state, rank, pc, number)
                        else:
                            pending.add((rank, pc, number))
                elif kind == EXIT:
                    self.begin(state, (), action[2], rank)
                elif kind == SIGNAL and not action[1]:
                    state.levels[action[3]] += action[4]
                    ranks.append(self.owner[action[3]])
                elif kind == COMPUTE and not action[2]:
                    self.begin(state, action[1], (), rank)
                    self.end(state, action[1], ())
                else:
                    if kind != ENTER:
                        self.begin(state, *action[1:3], rank)
                    pending.add((rank, pc, None))
                    break
                state.pcs[rank] += 1

    # Random delays ----------------------------------------------------------------------------

    def run_randomly(self, seed):
        """Run once, with random speeds of ranks and delays of copies; the number of events."""
        rng = random.Random(seed)
        state, num_events, now = self.initial(with_contents=True), 0, 0.0
        queue, moved, blocked = [], {}, set()
        slowness = [10 ** rng.uniform(-2, 1) for _ in range(self.num_ranks)]

        def later(rank, scale):
            return now + scale * slowness[rank] * rng.random()

        for rank in range(self.num_ranks):
            heapq.heappush(queue, (later(rank, 10), rank, -1, 0))
        while queue:
            now, rank, pc, number = heapq.heappop(queue)
            num_events += 1
            action = self.code[rank][pc if pc >= 0 else state.pcs[rank]]
            if pc >= 0 and action[0] == COPY:
                if number == len(action[1]) - 1:  # it has landed
                    for cell, value in zip(action[3], moved.pop((rank, pc)), strict=True):
                        state.contents[cell] = value
                woken = self._finish(state, rank, pc, number)
            elif pc >= 0:
                if action[0] == COMPUTE:
                    self.compute(state, action)
                woken = self._finish(state, rank, pc, None)
                blocked.add(rank)
            else:
                woken = self._begin_next(state, rank, action, moved, blocked, queue, later, rng)
            for other in woken:
                if other in blocked and state.pcs[other] < len(self.code[other]):
                    blocked.discard(other)
                    heapq.heappush(queue, (later(other, 1), other, -1, 0))
        self.check_end(state)
        return num_events

    def _begin_next(self, state, rank, action, moved, blocked, queue, later, rng):
        kind, pc = action[0], state.pcs[rank]
        if kind in (SIGNAL, COMPUTE, ENTER):
            if kind != ENTER:
                self.begin(state, *action[1:3], rank)
            heapq.heappush(queue, (later(rank, 1), rank, pc, 0))
            return ()
        blocked.add(rank)
        if kind == WAIT:
            if state.levels[action[1]] < action[2]:
                return ()
            state.levels[action[1]] -= action[2]
        elif kind == COPY:
            moved[rank, pc] = [state.contents[cell] for cell in action[2]]
            for number, end in enumerate(action[1]):
                self.begin(state, end[0], end[1], rank)
                delay = 10 ** rng.uniform(-2, 2)
                heapq.heappush(queue, (later(rank, 0) + delay, rank, pc, number))
        else:
            self.begin(state, (), action[2], rank)
        state.pcs[rank] += 1
        return (rank,)
