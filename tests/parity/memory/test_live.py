"""Which buffers live at the fullest point, of programs small enough for the head."""

from parity.memory import live, scheduled

A = "f32[256,128]{1,0:T(8,128)}"  # 131,072 bytes
UNIT = 131_072


def program(lines, *, others=""):
    return scheduled.read(
        f"HloModule jit_f, is_scheduled=true\n\n{others}\n"
        "ENTRY %main (w: f32[256,128]) -> f32[256,128] {\n"
        f"  %w = {A} parameter(0), metadata={{op_name=\"state['w']\"}}\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


def units(module):
    return live.peak(module).total / UNIT


def test_a_chain_holds_two_and_its_result_is_no_temporary():
    module = program(
        [
            f"%a = {A} tanh(%w)",
            f"%b = {A} tanh(%a)",
            f"%c = {A} tanh(%b)",
            f"ROOT %d = {A} tanh(%c)",
        ]
    )
    assert units(module) == 2


def test_what_is_read_late_lives_long():
    module = program(
        [
            f"%a = {A} tanh(%w)",
            f"%b = {A} tanh(%a)",
            f"%c = {A} tanh(%b)",
            f"ROOT %d = {A} add(%a, %c)",
        ]
    )
    assert units(module) == 3


def test_names_of_buffers_are_no_buffers():
    module = program(
        [
            f"%a = {A} tanh(%w)",
            f"%t = ({A}, {A}) tuple(%a, %w)",
            f"%g = {A} get-tuple-element(%t), index=0",
            "%b = f32[32768]{0:T(1024)} bitcast(%g)",
            f"ROOT %d = {A} tanh(%b)",
        ]
    )
    assert units(module) == 1


def test_other_memory_does_not_count():
    near = A.replace("}", "S(1)}")
    module = program([f"%a = {near} tanh(%w)", f"ROOT %d = {A} tanh(%a)"])
    assert units(module) == 0


def test_an_update_is_in_place_also_within_a_fusion():
    fused = f"""%fused (p: f32[256,128], q: f32[8,128]) -> f32[256,128] {{
  %p = {A} parameter(0)
  %q = f32[8,128]{{1,0:T(8,128)}} parameter(1)
  %z = s32[]{{:T(128)}} constant(0)
  ROOT %u = {A} dynamic-update-slice(%p, %q, %z, %z)
}}
"""
    module = program(
        [
            f"%a = {A} tanh(%w)",
            "%s = f32[8,128]{1,0:T(8,128)} slice(%w), slice={[0:8], [0:128]}",
            f"%b = {A} fusion(%a, %s), kind=kLoop, calls=%fused",
            f"ROOT %d = {A} tanh(%b)",
        ],
        others=fused,
    )
    assert units(module) == 1 + 8 / 256


def loop(body_lines):
    body = (
        f"%body (c: (s32[], f32[256,128])) -> (s32[], f32[256,128]) {{\n"
        f"  %c = (s32[]{{:T(128)}}, {A}) parameter(0)\n"
        "  %n = s32[]{:T(128)} get-tuple-element(%c), index=0\n"
        f"  %x = {A} get-tuple-element(%c), index=1\n"
        + "".join(f"  {line}\n" for line in body_lines)
        + f"  ROOT %next = (s32[]{{:T(128)}}, {A}) tuple(%n, %y)\n}}\n"
    )
    return program(
        [
            f"%a = {A} tanh(%w)",
            f"%b = {A} tanh(%w)",
            "%z = s32[]{:T(128)} constant(0)",
            f"%s = (s32[]{{:T(128)}}, {A}) tuple(%z, %a)",
            f"%l = (s32[]{{:T(128)}}, {A}) while(%s), condition=%cond, body=%body",
            f"%r = {A} get-tuple-element(%l), index=1",
            f"ROOT %d = {A} add(%r, %b)",
        ],
        others=body,
    )


def test_a_loop_holds_what_is_alive_around_it_and_within():
    module = loop(
        [
            f'%u = {A} tanh(%x), metadata={{op_name="jit(f)/while/inner"}}',
            f"%v = {A} tanh(%u)",
            f"%y = {A} add(%u, %v)",
        ]
    )
    found = live.peak(module)
    # What is carried, what is read after the loop, and two within.
    assert found.total == 4 * UNIT
    assert "jit(f)/while/inner" in [buffer.op_name for buffer in found.buffers]


def test_what_a_loop_gives_back_stands_in_what_it_carries():
    assert units(loop([f"%y = {A} tanh(%x)"])) == 2


def test_a_form_of_a_parameter_is_known_by_its_name():
    module = program(
        [
            "%c = bf16[256,128]{1,0:T(8,128)(2,1)} convert(%w)",
            "%g = bf16[1024,128]{1,0:T(8,128)(2,1)} all-gather(%c), dimensions={0}",
            f"ROOT %d = {A} custom-call(%g)",
        ]
    )
    found = live.peak(module)
    assert [b.parameter for b in found.buffers] == ["state['w']", "state['w']"]
    assert found.total == 5 * UNIT / 2
    assert {buffer.op_name for buffer in found.buffers} == {""}


def test_the_sum_is_that_of_the_buffers():
    found = live.peak(loop([f"%y = {A} tanh(%x)"]))
    assert found.total == sum(buffer.leaf.size for buffer in found.buffers)
    sizes = [buffer.leaf.size for buffer in found.buffers]
    assert sizes == sorted(sizes, reverse=True)
