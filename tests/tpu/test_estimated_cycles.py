"""Cycles of compiled programs besides their permutations."""

import re

import pytest

from ftmesh.execute.lowering import Loop
from ftmesh.tpu.compiled_rounds import (
    CompiledLoop,
    compiled_loops,
    cycles_outside_rounds,
    describe_loops,
    total_cycles,
)
from ftmesh.tpu.estimated_cycles import Cycles, RoundCycles, segments
from ftmesh.units import format_bytes

# What the TPU compiler writes, with fewer instructions: a round that was unrolled into the main
# computation, a loop of two permutations with a tuple for its state, and one with a loop in it.
TEXT = """\
HloModule jit_step, is_scheduled=true

%fused.1 (p.1: f32[8,8,128], p.2: s32[]) -> (f32[1,8,128], f32[1,8,128]) {
  %p.1 = f32[8,8,128]{2,1,0:T(8,128)} parameter(0)
  %p.2 = s32[]{:T(128)} parameter(1)
  ROOT %slices = (f32[1,8,128]{2,1,0}, f32[1,8,128]{2,1,0}) tuple(%p.1, %p.1)
}

%body.1 (state.1: (s32[], f32[8,8,128], s32[32])) -> (s32[], f32[8,8,128], s32[32]) {
  %state.1 = (s32[]{:T(128)}, f32[8,8,128]{2,1,0:T(8,128)}, s32[32]{0:T(128)S(1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %buffer.1 = f32[8,8,128]{2,1,0:T(8,128)} get-tuple-element(%state.1), index=1
  %table.1 = s32[32]{0:T(128)S(1)} get-tuple-element(%state.1), index=2
  %row.1 = s32[1]{0:T(128)} dynamic-slice(%table.1, %i.1), dynamic_slice_sizes={1}, SCOPE(read), \
CYCLES(2120)
  %chunk.1 = s32[1]{0:T(128)} maximum(%row.1, %row.1), SCOPE(max)
  %out.1 = (CHUNK, CHUNK) fusion(%buffer.1, %chunk.1), kind=kLoop, calls=%fused.1, SCOPE(slice), \
CYCLES(2592)
  %out.2 = CHUNK get-tuple-element(%out.1), index=0
  %s.1 = (CHUNK, CHUNK, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%out.2), \
channel_id=1, source_target_pairs={{0,1},{1,0}}, SCOPE(ppermute)
  %s.2 = (CHUNK, CHUNK, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%out.2), \
channel_id=2, source_target_pairs={{0,1},{1,0}}, SCOPE(ppermute)
  %overlapped.1 = f32[8,128]{1,0} copy(%out.2), CYCLES(300)
  %d.1 = CHUNK collective-permute-done(%s.1), SCOPE(ppermute)
  %overlapped.2 = f32[8,128]{1,0} copy(%out.2), CYCLES(40)
  %d.2 = CHUNK collective-permute-done(%s.2), SCOPE(ppermute)
  %new.1 = f32[8,8,128]{2,1,0:T(8,128)} fusion(%buffer.1, %d.1), kind=kLoop, calls=%fused.1, \
SCOPE(update), CYCLES(2617)
  %one.1 = s32[]{:T(128)} constant(1)
  %next.1 = s32[]{:T(128)} add(%i.1, %one.1), SCOPE(add)
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[8,8,128]{2,1,0}, s32[32]{0}) tuple(%next.1, %new.1, %table.1)
}

%condition.1 (state.2: (s32[], f32[8,8,128], s32[32])) -> pred[] {
  %state.2 = (s32[]{:T(128)}, f32[8,8,128]{2,1,0:T(8,128)}, s32[32]{0:T(128)S(1)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %n.2 = s32[]{:T(128)} constant(32)
  ROOT %go.2 = pred[]{:T(512)} compare(%i.2, %n.2), direction=LT, SCOPE(lt)
}

%body.3 (state.3: f32[8,8,128]) -> f32[8,8,128] {
  %state.3 = f32[8,8,128]{2,1,0:T(8,128)} parameter(0)
  ROOT %add.3 = f32[8,8,128]{2,1,0:T(8,128)} add(%state.3, %state.3), CYCLES(100)
}

%condition.3 (state.4: f32[8,8,128]) -> pred[] {
  ROOT %go.4 = pred[]{:T(512)} constant(true)
}

%body.5 (state.5: f32[8,8,128]) -> f32[8,8,128] {
  %state.5 = f32[8,8,128]{2,1,0:T(8,128)} parameter(0)
  %inner.5 = f32[8,8,128]{2,1,0:T(8,128)} while(%state.5), condition=%condition.3, body=%body.3INNER
  %sent.5 = CHUNK slice(%inner.5), CYCLES(11)
  %plain.5 = CHUNK collective-permute(%sent.5), source_target_pairs={{0,1},{1,0}}
  ROOT %new.5 = f32[8,8,128]{2,1,0:T(8,128)} fusion(%inner.5, %plain.5), calls=%fused.1, CYCLES(22)
}

%condition.5 (state.6: f32[8,8,128]) -> pred[] {
  ROOT %go.6 = pred[]{:T(512)} constant(true)
}

ENTRY %main (x: f32[8192]) -> f32[8192] {
  %x = f32[8192]{0:T(1024)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %packed = f32[8,8,128]{2,1,0:T(8,128)} pad(%x, %zero), OUTSIDE(concatenate), CYCLES(624612)
  %rank = s32[1]{0:T(128)} dynamic-slice(%zero), OWN(axis_index), CYCLES(2122)
  %prefetch = (s32[32]{0:S(1)}, s32[32]{0}, u32[]{:S(2)}) copy-start(%rank)
  %half = CHUNK slice(%packed), SCOPE(slice), CYCLES(1000)
  %s.7 = (CHUNK, CHUNK, u32[]{:S(2)}) collective-permute-start(%half), channel_id=7, SCOPE(ppermute)
  %d.7 = CHUNK collective-permute-done(%s.7), SCOPE(ppermute)
  %whole = f32[8,8,128]{2,1,0:T(8,128)} fusion(%packed, %d.7), calls=%fused.1, SCOPE(update), \
CYCLES(3000)
  %ready = s32[32]{0:S(1)} copy-done(%prefetch)
  %init = (s32[]{:T(128)}, f32[8,8,128]{2,1,0:T(8,128)}, s32[32]{0}) tuple(%zero, %whole, %ready)
  %loop.1 = (s32[]{:T(128)}, f32[8,8,128]{2,1,0:T(8,128)}, s32[32]{0:T(128)S(1)}) while(%init), \
condition=%condition.1, body=%body.1, OWN(while)
  %sum.1 = f32[8,8,128]{2,1,0:T(8,128)} get-tuple-element(%loop.1), index=1
  %loop.5 = f32[8,8,128]{2,1,0:T(8,128)} while(%sum.1), condition=%condition.5, body=%body.5, \
OWN(while)OUTER
  ROOT %mean = f32[8192]{0:T(1024)} fusion(%loop.5), calls=%fused.1, OUTSIDE(div), CYCLES(265871)
}
"""
CHUNK = 8 * 128 * 4  # bytes


def program(inner=3, outer=None):
    """The program, in which the compiler may state the trip counts of two nested loops."""
    text = TEXT.replace("CHUNK", "f32[1,8,128]{2,1,0:T(8,128)S(1)}")
    for name, count in (("INNER", inner), ("OUTER", outer)):
        config = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count else ""
        text = text.replace(name, config)
    scopes = {
        "SCOPE": "ftmesh.all_reduce/while/body/eval_jaxpr/",
        "OWN": "ftmesh.all_reduce/",
        "OUTSIDE": "",
    }
    for name, scope in scopes.items():
        metadata = rf'metadata={{op_name="jit(step)/shard_map/{scope}\1" stack_frame_id=2}}'
        text = re.sub(rf"\b{name}\((\w+)\)", metadata, text)
    config = r'backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"\1"}}'
    return re.sub(r"\bCYCLES\((\d+)\)", config, text)


def loop(name, rounds, lanes):
    """A planned loop without its lanes."""
    return Loop(name, rounds, (None,) * lanes)


PLANNED = [loop("between cores", 1, 1), loop("around", 32, 2), loop("across", 6, 1)]


def test_cycles_of_all_loops():
    between, around, across = compiled_loops(program(), PLANNED)
    # An unrolled round is what is in its scope, without the reading of tables and the packing.
    assert between == CompiledLoop(
        "between cores", 1, 1, False, RoundCycles(1000 + 3000, 0, (), 1, CHUNK)
    )
    # The number of rounds is that of the loop condition.
    exposed, hidden = 2120 + 2592 + 2617, 300 + 40
    assert around == CompiledLoop(
        "around", 2, 2, False, RoundCycles(exposed, hidden, (), 32, 2 * CHUNK)
    )
    # It is the plan's, and an inner loop runs three times per round.
    assert across == CompiledLoop(
        "across", 1, 1, True, RoundCycles(3 * 100 + 11 + 22, 0, (), 6, CHUNK)
    )


@pytest.mark.parametrize(
    ("old", "new", "rounds"),
    [
        ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} constant(10)", 22),
        ("tuple(%zero, %whole, %ready)", "tuple(%copied, %whole, %ready)", 32),
        ("constant(1)\n", "constant(5)\n", 7),
        ("add(%i.1, %one.1)", "add(%one.1, %i.1)", 32),
        ("add(%i.1, %one.1)", "add(%i.1, %chunk.1)", None),  # depends on data
        ("tuple(%zero, %whole, %ready)", "tuple(%rank, %whole, %ready)", None),
        ("direction=LT", "direction=NE", None),
        ("ROOT %go.2", "ROOT %wanted = pred[] and(%go.2, %go.2)\n  %go.2", None),
    ],
)
def test_trip_counts(old, new, rounds):
    copied = "  %copied = s32[]{:T(128)} copy(%zero)\n  %init ="
    text = program().replace("  %init =", copied)
    assert old in text
    _, around, _ = compiled_loops(text.replace(old, new))
    assert around.cycles.rounds == rounds


def test_permutations_in_a_users_loop_own_what_is_in_their_scope():
    loop = '%body.1, metadata={op_name="jit(step)/shard_map/ftmesh.all_reduce/'
    assert loop in program()
    text = program().replace(loop, loop.replace("ftmesh.all_reduce/", ""))
    _, around, _ = compiled_loops(text)
    assert around.cycles == RoundCycles(2120 + 2592 + 2617, 0, (), 32, 2 * CHUNK)
    assert cycles_outside_rounds(text).total == cycles_outside_rounds(program()).total + 32 * 340


def test_permutations_without_a_scope_own_their_loop():
    text = program().replace("ftmesh.all_reduce/", "")
    between, around, _ = compiled_loops(text)
    assert between.cycles.total == 0  # what belongs to it is not known
    assert around.cycles.total == 7669


def test_cycles_outside_rounds():
    assert cycles_outside_rounds(program()) == Cycles(624_612 + 2122 + 265_871)


class TestRoundsAndIterations:
    """An iteration of a compiled loop may run several rounds, and some run after the loop."""

    def test_several_rounds_per_iteration(self):
        planned = [PLANNED[0], loop("around", 64, 1), loop("across", 3, 2)]
        _, around, across = compiled_loops(program(outer=6), planned)
        assert around == CompiledLoop(
            "around", 1, 2, False, RoundCycles(round(7329 / 2), 170, (), 64, CHUNK)
        )
        assert (across.permutations, across.cycles.total) == (2, 2 * 333)

    def test_the_last_rounds_of_a_loop_are_after_it(self):
        planned = [PLANNED[0], loop("around", 70, 1)]
        _, around = compiled_loops(program(outer=6), planned)
        assert around.name == "around"
        assert around.cycles.total == pytest.approx((32 * 7669 + 6 * 333) / 70, abs=1)
        assert around.cycles.sent_bytes == CHUNK

    def test_loops_that_cannot_be_distinguished(self):
        planned = [loop("between", 1, 1), loop("first", 16, 2), loop("second", 8, 4), PLANNED[2]]
        _, both, _ = compiled_loops(program(outer=6), planned)
        assert (both.name, both.cycles.rounds) == ("first and second", 24)

    def test_loops_that_run_once_for_each_dtype(self):
        again = "  %p.8 = f32[1,8,128]{2,1,0} collective-permute(%half)"
        text = program(outer=64).replace("  %loop.5 =", f"{again}\n  %loop.5 =")
        loops = compiled_loops(text, [loop("there", 1, 1), loop("back", 32, 2)])
        assert [(x.name, x.permutations, x.cycles.rounds) for x in loops] == [
            ("there", 1, 1), ("back", 2, 32), ("there", 1, 1), ("back", 2, 32),
        ]  # fmt: skip

    def test_the_plan_of_another_program_is_ignored(self):
        planned = [PLANNED[0], loop("around", 33, 2), PLANNED[2]]
        loops = compiled_loops(program(outer=6), planned)
        assert [(x.name, x.cycles.rounds) for x in loops] == [
            ("loop 0", 1), ("loop 1", 32), ("loop 2", 6),
        ]  # fmt: skip

    def test_an_unknown_number_of_rounds(self):
        *_, across = compiled_loops(program())
        assert across.cycles.rounds is None
        assert "unknown number of rounds" in str(across.cycles)
        assert total_cycles([across]) == Cycles(333, 0, (("while", 0),))

    def test_an_unknown_trip_count_of_a_users_loop(self):
        """What it does besides the permutations is counted once, and reported as unknown."""

        def outside(**counts):
            text = re.sub(
                r'(body=%body.5, metadata=.op_name="[^"]*)ftmesh.', r"\1", program(**counts)
            )
            plain = "collective-permute(%sent.5)"
            assert plain in text
            return cycles_outside_rounds(
                text.replace(plain, f'{plain}, metadata={{op_name="ftmesh.psum/ppermute"}}')
            )

        without = 624_612 + 2122 + 265_871
        assert outside(outer=6) == Cycles(without + 6 * 333)
        assert outside() == Cycles(without + 333, 0, (("while", 0),))


def test_the_text_of_loops():
    lines = describe_loops(compiled_loops(program(outer=6)))
    assert lines[2:4] == [
        "  loop 1: 2 permutations per round, 2 in flight at once",
        "    7,669 cycles per round besides the permutations, 340 of them hidden; 32 rounds",
    ]
    total = 4000 + 32 * 7669 + 6 * 333
    assert lines[-1] == (
        f"  {total:,} cycles in all rounds besides permutations, {32 * 340:,} hidden, "
        "by the compiler's estimates"
    )


class TestPlantedFaults:
    """An instruction that takes time and has no estimate is reported."""

    @pytest.mark.parametrize(
        ("line", "number"),
        [("%new.1 =", 1), ("%overlapped.1 =", 1), ("%add.3 =", 2), ("%whole =", 0)],
    )
    def test_in_a_loop(self, line, number):
        lines = program().splitlines()
        (index,) = [i for i, text in enumerate(lines) if line in text]
        lines[index] = lines[index].partition(", backend_config")[0]
        loops = compiled_loops("\n".join(lines))
        opcode = {"%overlapped.1 =": "copy", "%add.3 =": "add"}.get(line, "fusion")
        size = CHUNK if opcode == "copy" else 8 * CHUNK
        assert [x.cycles.unknown for x in loops] == [
            ((opcode, size),) if i == number else () for i in range(3)
        ]
        unknown = f"; without an estimate: 1 {opcode} of {format_bytes(size)}"
        assert str(loops[number].cycles).endswith(unknown)

    def test_outside(self):
        text = program().replace('"estimated_cycles":"624612"', "")
        assert cycles_outside_rounds(text) == Cycles(2122 + 265_871, 0, (("pad", 8 * CHUNK),))

    def test_an_inner_loop_with_an_unknown_trip_count(self):
        *_, across = compiled_loops(program(inner=None))
        assert (across.cycles.total, across.cycles.unknown) == (100 + 11 + 22, (("while", 0),))

    def test_a_program_without_estimates(self):
        text = program().replace("estimated_cycles", "size")
        assert {x.cycles for x in compiled_loops(text)} == {None}
        assert cycles_outside_rounds(text) is None


def test_scalars_and_asynchronous_copies_are_free():
    first, *_ = segments(program())
    named = {i.name: i for i in first.instructions}
    assert named["prefetch"].opcode == "copy-start"
    assert first.other_cycles.unknown == ()


@pytest.mark.parametrize(("target", "is_free"), [("AllocateBuffer", True), ("SortOfSums", False)])
def test_allocating_a_buffer_is_free(target, is_free):
    call = f'f32[8192]{{0}} custom-call(), custom_call_target="{target}"'
    text = program().replace("  %packed =", f"  %more = {call}\n  %packed =")
    unknown = () if is_free else (("custom-call", 4 * 8192),)
    assert cycles_outside_rounds(text).unknown == unknown
