"""The program tier: several shapes, several platforms, programs that are refused."""

import jax
import jax.numpy as jnp
import pytest

from parity.programs import tier
from parity.programs.program import ProgramError

F2, F4 = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (2, 4))


def plain(x):
    return jnp.sin(x) + 1.0


def other(x):
    return jnp.cos(x) + 1.0


def for_short_ones(x):
    return plain(x) if x.shape[0] < 3 else other(x)


def refused(x):
    jax.debug.callback(print, x)
    return plain(x)


def test_every_function_shape_and_platform_is_compared():
    found = tier.check_programs(
        {"forward": (plain, jax.jit(plain)), "other": (other, other)},
        [(F2,), (F4,)],
        ["cpu", "tpu"],
    )
    assert (found.name, found.status, found.note) == ("program", "proved", tier.NOTE)
    assert found.compared.leaves == 2 * 2 * 2
    assert found.compared.elements > 8
    assert not found.details


def test_a_difference_at_other_shapes_only_is_found_there():
    functions = {"forward": (plain, for_short_ones)}
    assert tier.check_programs(functions, [(F2,)]).status == "proved"
    found = tier.check_programs(functions, [(F2,), (F4,)], ["cpu"])
    assert found.status == "failed"
    (difference,) = found.differences
    assert difference.path == "forward on cpu with shapes 2"
    assert all(line.startswith(f"{difference.path}: ") for line in found.details)


def test_a_program_that_is_refused_is_skipped():
    found = tier.check_programs({"forward": (plain, refused)}, [(F2,)])
    assert found.status == "skipped"
    assert found.note.startswith("forward: Python callbacks have no canonical form")
    assert found.details == (found.note,)
    assert not found.compared.leaves


def test_one_refused_program_of_several_is_not_proved():
    functions = {"forward": (plain, plain), "gradient": (refused, refused)}
    found = tier.check_programs(functions, [(F2,)])
    assert (found.status, found.compared.leaves) == ("inconclusive", 1)
    assert found.note.startswith("gradient: Python callbacks")
    differs = tier.check_programs(functions | {"more": (plain, other)}, [(F2,)])
    assert differs.status == "failed"
    assert tier.merged([found, differs]).status == "failed"
    proved = tier.check_programs({"forward": (plain, plain)}, [(F2,)])
    assert tier.merged([proved, found]).status == "inconclusive"
    assert tier.merged([proved, proved]).status == "proved"


def test_nothing_compared_is_nothing_proved():
    assert tier.check_programs({"forward": (plain, plain)}, []).status == "failed"


@pytest.mark.parametrize("platforms", [["gameboy"], []])
def test_unknown_platforms_are_refused(platforms):
    with pytest.raises(ProgramError, match="Platforms to lower for"):
        tier.check_programs({"forward": (plain, plain)}, [(F2,)], platforms)
