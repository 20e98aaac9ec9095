"""Reading a compiled program: sizes with padding, tuples, calls, broken lines."""

# ruff: noqa: E501 — a program is quoted as the compiler prints it.

import pytest

from parity.memory import scheduled

PROGRAM = """HloModule jit_step, is_scheduled=true

%body (carried: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %carried = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%carried), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%carried), index=1
  %call = (f32[8,128]{1,0:T(8,128)}, /*index=1*/bf16[3,130]{1,0:T(8,128)(2,1)S(1)}) custom-call(%x), custom_call_target="kernel", frontend_attributes={kernel_metadata={
"block": "{512}"
},other="1"}, metadata={op_name="jit(step)/while/kernel"}
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%call), index=0
  ROOT %next = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%n, %y)
}

ENTRY %main (w: f32[8,128]) -> f32[8,128] {
  %w = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="state['w']"}
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%zero, %w)
  %loop = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%start), condition=%cond, body=%body
  ROOT %out = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("kind", "size", "space"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 8 * 128 * 4, 0),
        # Rows of 130 fill two lanes' tiles; three rows fill one tile of eight.
        ("bf16[3,130]{1,0:T(8,128)(2,1)S(1)}", 8 * 256 * 2, 1),
        # The dimension that is fastest in memory is the first here.
        ("f32[3,130]{0,1:T(8,128)}", 128 * 136 * 4, 0),
        ("bf16[2,4096,1,32]{3,1,0,2:T(8,128)(2,1)}", 2 * 4096 * 128 * 2, 0),
        ("f32[2,3]{1,0}", 24, 0),
        ("s32[]{:T(128)}", 4, 0),
        ("pred[16]{0:T(512)(128)(4,1)}", 512, 0),
    ],
)
def test_a_leaf_takes_its_tiles(kind, size, space):
    (leaf,) = scheduled.leaves_of(kind)
    assert (leaf.size, leaf.space) == (size, space)


def test_a_program_is_read_in_its_order():
    module = scheduled.read(PROGRAM)
    assert set(module.computations) == {"body", "main"}
    names = [line.name for line in module.computations["main"].instructions]
    assert names == ["w", "zero", "start", "loop", "out"]
    assert module.computations["main"].root.name == "out"


def test_lines_that_break_within_an_attribute_are_one():
    body = scheduled.read(PROGRAM).computations["body"]
    assert [line.opcode for line in body.instructions] == [
        "parameter",
        "get-tuple-element",
        "get-tuple-element",
        "custom-call",
        "get-tuple-element",
        "tuple",
    ]
    call = body.instructions[3]
    assert call.op_name == "jit(step)/while/kernel"
    assert [leaf.text for leaf in call.leaves] == ["f32[8,128]", "bf16[3,130]"]
    assert call.widths == (1, 1)


def test_a_loop_calls_its_body():
    loop = scheduled.read(PROGRAM).computations["main"].instructions[3]
    assert loop.called == ("body",)
    assert loop.operands == ("start",)


@pytest.mark.parametrize(
    "text", ["", "HloModule jit_step\n", "HloModule x, is_scheduled=true\n"]
)
def test_what_is_not_a_compiled_program_is_refused(text):
    with pytest.raises(scheduled.HloError):
        scheduled.read(text)
