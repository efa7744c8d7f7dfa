"""Tables of the Pallas executor: how transfers are split into pieces, and what a rank reads.

A transfer is the rows of consecutive chunks, and travels in pieces. In most loops all transfers
have one size and start at multiples of it. Then the pieces of one number form a program of their
own, and the first pieces of a round may go ahead of the last ones of the round before. If transfers
overlap in other ways, each is one piece. If what arrives in a round is not needed in the next, as
along trees planned with a lag, whole rounds go ahead of each other too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.execute.lowering import IDLE, MIXED, Lane, Loop, Rule, Table
from ftmesh.schedule.transfers import ADD, Ints

SLOTS = 1 << (SLOT_BITS := 2)  # pieces of a lane that may be in flight to a rank
PAGE_ROUNDS = 1 << (PAGE_BITS := 3)  # rounds in a page of the table
PAGE_WORDS = 128  # the words of a round are padded to a multiple of this
SEND, RECEIVE = 0, 1  # words of a lane in a round: its entry and the slot of its first piece
LANE_WORDS, DESTINATION, SOURCE = 12, 0, 1  # words of a lane in a header
RECEIVES_NOTHING = np.zeros(5, np.int32)  # words of a lane on which a rank receives nothing


@dataclass(frozen=True, eq=False)
class PieceSplit:
    """A loop whose transfers are split into `num_pieces`, the last of which may be shorter."""

    loop: Loop
    num_pieces: int
    rows: tuple[tuple[int, int], ...]  # by lane: of a piece, and of the last piece
    shares_chunks: bool  # lanes may write to one chunk in one round, and must wait for each other
    min_gap: tuple[int, int]  # rounds from a chunk's arrival until it is sent on, and added to
    first_page: int  # of the loop in the table

    @property
    def is_mixed(self) -> bool:
        return any(lane.op == MIXED for lane in self.loop.lanes)

    @property
    def waits_word(self) -> int:
        """The word of a round that has a bit for each lane whose arrival must wait."""
        return 2 * len(self.loop.lanes)

    @property
    def lag(self) -> int:
        """How many pieces are sent before the first arrival is handled."""
        return min(self.min_gap[0] * self.num_pieces, SLOTS) - 1

    @property
    def fetch_lag(self) -> int:
        """How many pieces are sent before the first rows to add to are fetched."""
        return self.lag - min(self.min_gap[1] * self.num_pieces - 1, self.lag)

    @property
    def rounds_behind(self) -> int:
        """How many rounds after its start all arrivals of a round are handled."""
        return -(-self.lag // self.num_pieces)

    @property
    def num_pages(self) -> int:
        return -(-self.loop.num_rounds // PAGE_ROUNDS)


def split_loops(
    loops: tuple[Loop, ...], *, chunk_rows: int, tile: int, max_rows: int
) -> tuple[PieceSplit, ...]:
    """Split the transfers of loops into pieces of at most `max_rows` rows, in whole tiles.

    Transfers that must be one piece may be longer: the caller checks that they fit.
    """
    splits: list[PieceSplit] = []
    for loop in loops:
        is_aligned, shares_chunks = _overlaps(loop)
        rows = [lane.count * chunk_rows for lane in loop.lanes]
        num_pieces, sizes = 1, tuple((size, size) for size in rows)
        if is_aligned:
            piece = _piece_rows(rows[0], tile, max_rows)
            num_pieces = -(-rows[0] // piece)
            sizes = ((piece, rows[0] - (num_pieces - 1) * piece),) * len(rows)
        first_page = splits[-1].first_page + splits[-1].num_pages if splits else 0
        gap = _min_gap(loop)
        splits.append(PieceSplit(loop, num_pieces, sizes, shares_chunks, gap, first_page))
    return tuple(splits)


def _piece_rows(rows: int, tile: int, max_rows: int) -> int:
    """The rows of each piece but the last: few enough to keep links busy while pieces are added.

    >>> _piece_rows(1000, 8, 512), _piece_rows(40, 8, 512), _piece_rows(4000, 8, 512)
    (256, 40, 504)
    """
    least = max(max_rows // SLOTS, tile)
    num = max(-(-rows // max_rows), min(SLOTS, rows // least), 1)
    return -(-rows // (num * tile)) * tile


@lru_cache(maxsize=64)
def _overlaps(loop: Loop) -> tuple[bool, bool]:
    """Whether overlapping transfers coincide, and whether lanes write to one chunk in a round."""
    received = [lane.chunk_ids(lane.received_entries(loop.num_rounds)) for lane in loop.lanes]
    counts = {lane.count for lane in loop.lanes}
    chunks = np.concatenate([lane_chunks[lane_chunks != IDLE] for lane_chunks in received])
    shares_chunks = False
    for (a, a_chunk), (b, b_chunk) in combinations(zip(loop.lanes, received, strict=True), 2):
        overlap = (a_chunk < b_chunk + b.count) & (b_chunk < a_chunk + a.count)
        both = (a_chunk != IDLE) & (b_chunk != IDLE)
        shares_chunks = shares_chunks or bool((overlap & both).any())
    is_aligned = len(counts) == 1 and len(np.unique(chunks % max(counts))) <= 1
    return is_aligned, shares_chunks


@lru_cache(maxsize=64)
def _min_gap(loop: Loop) -> tuple[int, int]:
    """`PieceSplit.min_gap`, the fewest; `SLOTS` stands for that many or more."""
    sent = [lane.chunk_ids(lane.send.entries(loop.num_rounds)) for lane in loop.lanes]
    received = [lane.received_entries(loop.num_rounds) for lane in loop.lanes]
    lanes = list(zip(loop.lanes, sent, received, strict=True))
    num_chunks = max(int(chunks.max()) + lane.count for lane, chunks, _ in lanes)
    arrived = np.full((len(sent[0]), num_chunks), -SLOTS)  # [rank, chunk]: the last round
    to_send = to_add = SLOTS

    def index(lane: Lane, chunks: Ints) -> tuple[Any, Any]:
        ranks = np.flatnonzero(chunks != IDLE)
        return ranks[:, None], chunks[ranks, None] + np.arange(lane.count)

    for now in range(loop.num_rounds):
        for lane, chunks, entries in lanes:
            entry = entries[:, now]
            added = np.where(lane.ops(entry) == ADD, lane.chunk_ids(entry), IDLE)
            to_send = min(to_send, now - arrived[index(lane, chunks[:, now])].max(initial=-SLOTS))
            to_add = min(to_add, now - arrived[index(lane, added)].max(initial=-SLOTS))
        for lane, _, entries in lanes:
            arrived[index(lane, lane.chunk_ids(entries[:, now]))] = now
        if to_send == to_add == 1:
            break
    return int(to_send), int(to_add)


@lru_cache(maxsize=64)
def partner_table(loops: tuple[Loop, ...], num_ranks: int) -> Ints:
    """For each rank the ranks it communicates with, in ascending order, padded with -1."""
    pairs = {pair for loop in loops for lane in loop.lanes for pair in lane.permutation}
    partners: list[set[int]] = [set() for _ in range(num_ranks)]
    for src, dst in pairs:
        partners[src].add(dst)
        partners[dst].add(src)
    table = np.full((num_ranks, max(1, *map(len, partners))), -1, np.int32)
    for rank, others in enumerate(partners):
        table[rank, : len(others)] = sorted(others)
    return table


@lru_cache(maxsize=64)
def rank_headers(loops: tuple[Loop, ...], num_ranks: int) -> Ints:
    """For each rank its partners, then `LANE_WORDS` words for each lane of each loop.

    A lane's words are the destination, the source, and five words each for what the rank sends and
    receives: see `_send_words` and `_round_words`.
    """
    columns = [partner_table(loops, num_ranks)]
    for loop in loops:
        row = 0
        for lane in loop.lanes:
            destination, is_receiver = np.full(num_ranks, -1, np.int32), lane.source >= 0
            destination[lane.source[is_receiver]] = np.flatnonzero(is_receiver)
            words = _send_words(lane.send, row)
            received = np.where(is_receiver[:, None], words[lane.source], RECEIVES_NOTHING)
            columns += [destination[:, None], lane.source[:, None], words, received]
            row += len(lane.send.rows) if isinstance(lane.send, Table) else 0
    return np.concatenate(columns, axis=1, dtype=np.int32)


def _send_words(send: Table | Rule, first_row: int) -> Ints:
    """For each rank five words that say what it sends; see `_round_words`."""
    if isinstance(send, Rule):
        return np.stack([send.begin, send.end, send.first, send.position, send.step], axis=1)
    always = np.full_like(send.base, np.iinfo(np.int32).max)
    row = send.row + first_row
    return np.stack([0 * always, always, send.base, row, row], axis=1)


def rank_pages(splits: tuple[PieceSplit, ...], header: jax.Array, num_partners: int) -> jax.Array:
    """What the rank of a header sends and receives in each round of each loop, in pages.

    Rounds of rules are computed, so that no table of all ranks is in the program.
    """
    width = PAGE_WORDS * -(-max(split.waits_word + 1 for split in splits) // PAGE_WORDS)
    words = header[num_partners:].reshape(-1, LANE_WORDS)
    pages = []
    for split in splits:
        lanes, words = words[: len(split.loop.lanes)], words[len(split.loop.lanes) :]
        rounds = _round_words(split, lanes[:, 2:].reshape(-1, 2, len(RECEIVES_NOTHING)))
        missing = split.num_pages * PAGE_ROUNDS - split.loop.num_rounds, width - rounds.shape[1]
        padded = jnp.pad(rounds, [(0, missing[0]), (0, missing[1])])
        pages.append(padded.reshape(-1, PAGE_ROUNDS, width))
    return jnp.concatenate(pages)


def _round_words(split: PieceSplit, lane_words: jax.Array) -> jax.Array:
    """For each round a row of words: what is sent and received on each lane, and which lanes wait.

    In ``lane_words[lane, SEND or RECEIVE]`` are the first active round and the end, then the first
    chunk, position and step of a rule; or the base of a table's entries and a row of it.
    """
    loop = split.loop
    now = np.arange(loop.num_rounds, dtype=np.int32)
    tables = [i for i, lane in enumerate(loop.lanes) if isinstance(lane.send, Table)]
    table_rows = {}
    if tables:
        rows = _table_words(split)[lane_words[np.array(tables), :, 3]].astype(np.int32)
        table_rows = dict(zip(tables, rows, strict=True))
    words = []
    for i, lane in enumerate(loop.lanes):
        begin, end, first, position, step = (lane_words[i, :, word, None] for word in range(5))
        is_active = (begin <= now) & (now < end)
        if isinstance(lane.send, Rule):
            chunk = first + (position + step * now) % lane.send.size * lane.send.count
            word = chunk * SLOTS + (now - begin) * split.num_pieces % SLOTS
        else:
            word = first * SLOTS + table_rows[i]
            is_active &= table_rows[i] != IDLE
        words.append(jnp.where(is_active, word, IDLE))
    if split.is_mixed and split.shares_chunks:
        words.append(_waits_masks(split, [received for _, received in words])[None])
    return jnp.concatenate(words).T


def _waits_masks(split: PieceSplit, received: list[jax.Array]) -> jax.Array:
    """For each round a bit for each lane whose arrival shares a chunk with that of an earlier lane.

    Along trees few do: the others need not wait.
    """
    lanes = list(zip(split.loop.lanes, received, strict=True))
    chunks = [words >> (SLOT_BITS + (lane.op == MIXED)) for lane, words in lanes]
    masks = jnp.zeros_like(received[0])
    for i, j in combinations(range(len(lanes)), 2):
        ahead = chunks[j] - chunks[i]
        overlap = (ahead < lanes[i][0].count) & (-ahead < lanes[j][0].count)
        both = (received[i] >= 0) & (received[j] >= 0)
        masks |= jnp.where(overlap & both, 1 << j, 0)
    return masks


def _table_words(split: PieceSplit) -> jax.Array:
    """The rows of all tables of a loop, with slots: only transfers that happen take one.

    Mixed lanes have a row for nearly every rank, so those are kept small.
    """
    rows = np.concatenate(
        [lane.send.rows for lane in split.loop.lanes if isinstance(lane.send, Table)]
    )
    is_active = rows != IDLE
    slots = (np.cumsum(is_active, axis=1) - is_active) * split.num_pieces % SLOTS
    words = np.where(is_active, rows * SLOTS + slots, IDLE)
    is_short = split.is_mixed and words.max() < 2**15
    return jnp.asarray(words.astype(np.int16 if is_short else np.int32))
