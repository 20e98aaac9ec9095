"""The decode tier: what it proves, the faults that it alone finds, and near ties."""

import functools
import io
import json

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import rich.console

import parity
import parity.__main__
import shared
import zoo_nnx
from parity import decoders, decoding
from parity.decoders import PROMPT, ROWS, STEPS, Prompt
from parity.programs import program
from parity.trees import abstract
from shared.cache import GatedDeltaNetCache
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny
from tests.parity.reporting.test_report import SCHEMA

CONFIG = qwen3_next_tiny(4).replace(
    layers=tuple(
        LayerKind(mixer, "dense") for mixer in ("linear_attention", "full_attention")
    )
    * 2
)
LINEAR = (0, 2)
MOMENTS = ("prefill", *(f"step_{i + 1}" for i in range(STEPS)))
GAP = 2.0**-7


@functools.cache
def params():
    """First values whose layers say something: the embedding alone chooses no id."""
    first = shared.init_params(jax.random.key(0), CONFIG)
    return jax.tree.map(lambda leaf: 6 * leaf if leaf.ndim > 1 else leaf, first)


@functools.cache
def pair():
    return decoders.make_pair(CONFIG, params())


@functools.cache
def sides():
    return decoders.make_sides(pair())


@functools.cache
def plain():
    return decoding._forward(sides()[0])


def check(pair, **options):
    return decoding.check_decode(pair, plain=plain(), **options)


def faulty(cls):
    """The pair with an NNX decoder that calls itself otherwise."""
    model = zoo_nnx.from_params(CONFIG, params())
    model.__class__ = cls
    return pair()._replace(nnx=model)


def paths(tier):
    return {difference.path for difference in tier.differences}


def of_layers(change):
    """A change of the list of layer caches, as one of the whole cache."""

    def changed(cache):
        layers = change(shared.to_layer_list(CONFIG, cache))
        return shared.from_layer_list(CONFIG, layers)

    return changed


@of_layers
def swapped(layers):
    """The caches of the two linear layers, each in the other's place."""
    return [layers[2], layers[1], layers[0], layers[3]]


class Forgetful(zoo_nnx.Decoder):
    """Every step starts with an empty cache."""

    def __call__(self, tokens, *, cache=None, **options):
        if cache is not None and tokens.shape[1] == 1:
            cache = jax.tree.map(jnp.zeros_like, cache)
        return super().__call__(tokens, cache=cache, **options)


class Stuck(zoo_nnx.Decoder):
    """The position of linear layers stays where it was."""

    def __call__(self, tokens, *, cache=None, **options):
        output = super().__call__(tokens, cache=cache, **options)
        if cache is None:
            return output
        before = shared.to_layer_list(CONFIG, cache)
        after = shared.to_layer_list(CONFIG, output.cache)
        layers = [
            new._replace(position=old.position)
            if isinstance(new, GatedDeltaNetCache)
            else new
            for old, new in zip(before, after, strict=True)
        ]
        return output._replace(cache=shared.from_layer_list(CONFIG, layers))


class Swapped(zoo_nnx.Decoder):
    """Two layers' caches stand in each other's place, in and out: no logit shows it."""

    def __call__(self, tokens, *, cache=None, **options):
        if cache is None:
            return super().__call__(tokens, **options)
        output = super().__call__(tokens, cache=swapped(cache), **options)
        return output._replace(cache=swapped(output.cache))


def at_linear(moments, *names):
    return {f"{m}/cache/layer_{i}/{n}" for m in moments for i in LINEAR for n in names}


def gradient_digest(side):
    shape = jax.ShapeDtypeStruct((ROWS, decoders.LENGTH), jnp.int32)
    example = decoders.Example(shape, shape, shape)
    return program.lower(side.gradient, abstract(params()), example).digest


@functools.cache
def right_digest():
    return gradient_digest(sides()[1])


def test_both_frontends_decode_alike_and_as_the_plain_pass_says():
    tier = check(pair(), sides=sides())
    assert tier.status == "proved", tier
    assert tier.deterministic is True
    assert tier.details == ()
    cache = shared.init_cache(CONFIG, ROWS, PROMPT + STEPS)
    fields = len(jax.tree.leaves(shared.to_layer_list(CONFIG, cache)))
    size = sum(leaf.size for leaf in jax.tree.leaves(cache))
    moment = ROWS * CONFIG.vocab_size + ROWS
    count = STEPS + 1
    assert tier.compared.leaves == count * (fields + 2) + ROWS
    assert tier.compared.elements == count * (size + moment) + count * ROWS
    assert tier.examples == ROWS


def test_rows_of_the_prompt_have_different_lengths():
    for seed in range(50):
        tokens, lengths = decoding.draw_prompt(CONFIG, seed)
        assert lengths.max() == PROMPT > lengths.min() >= 2
        assert PROMPT + STEPS <= decoders.LENGTH
        assert tokens.dtype == np.int32
        for row, length in enumerate(lengths):
            assert not tokens[row, length:].any()


@pytest.mark.parametrize(
    ("cls", "found", "absent"),
    [
        (Forgetful, {"step_1/logits"}, {f"prefill/{n}" for n in ("logits", "ids")}),
        (Stuck, at_linear(MOMENTS[:1], "position"), {"prefill/logits"}),
        (
            Swapped,
            at_linear(MOMENTS[::2], "state", "conv_tail"),
            {f"{m}/{n}" for m in MOMENTS for n in ("logits", "ids")},
        ),
    ],
)
def test_a_fault_of_decoding_is_found_by_this_tier_and_not_by_bits(cls, found, absent):
    """The program that the bits tier runs is the same with and without the fault."""
    wrong = faulty(cls)
    assert gradient_digest(decoders.make_sides(wrong)[1]) == right_digest()
    report = parity.check_pair(wrong, ("tree", "decode"))
    assert report.tier("tree").status == "proved"
    tier = report.tier("decode")
    assert tier.status == "failed"
    assert found <= paths(tier)
    assert not absent & paths(tier)
    if cls is Stuck:
        assert {p for p in paths(tier) if p.startswith("prefill")} == found
    assert not report.ok
    assert f"decode: {tier.differences[0].path}" in report.to_text()


class OfBoth:
    """A fault that both frontends have: steps forget what was read."""

    def __init__(self, apply):
        self.apply, self.config = apply, apply.config

    def __call__(self, params, tokens, *, cache=None, **options):
        if cache is not None and tokens.shape[1] == 1:
            cache = jax.tree.map(jnp.zeros_like, cache)
        return self.apply(params, tokens, cache=cache, **options)


def test_a_fault_that_both_have_is_found_by_the_plain_pass():
    wrong = tuple(decoders.Side(OfBoth(side.apply)) for side in sides())
    tier = check(pair(), sides=wrong)
    assert tier.status == "failed"
    assert {d.what for d in tier.differences} == {"id"}
    assert all(path.startswith("definition/row_") for path in paths(tier))
    assert not any("prefill" in path for path in paths(tier))
    assert any("rounding explains" in line for line in tier.details)


def test_weights_that_do_not_fit_are_not_run():
    model = zoo_nnx.from_params(CONFIG, params())
    model.norm.set_value(jnp.zeros(3))
    tier = check(pair()._replace(nnx=model))
    assert (tier.status, tier.compared.leaves) == ("skipped", 0)


# The definition: ids beside the arg-max of the plain pass.


def one_row(plain, cached):
    """An answer of one step with these logits."""
    plain, cached = (np.asarray(x, np.float64)[None, None] for x in (plain, cached))
    ids = np.argmax(cached, -1)
    return plain, decoding.Answer(Prompt(np.zeros((1, 1)), np.ones(1)), ids, cached)


def test_equal_ids_are_counted():
    judged = decoding.judge(*one_row([0, 1, 3], [0, 1, 3]), moved=1e-7)
    assert judged.compared == parity.Comparison(1, 1)
    assert judged.lines() == ()


@pytest.mark.parametrize("flipped", [False, True])
def test_a_near_tie_is_neither_equal_nor_failed(flipped):
    near = 1e-7
    left, right = [0, 3, 3 + near], [0, 3 + near, 3] if flipped else [0, 3, 3 + near]
    shifted = np.add(right, [near, near, near])
    judged = decoding.judge(*one_row(left, shifted), moved=near)
    assert judged.compared == parity.Comparison(1, 0)
    (line,) = judged.lines()
    assert "row_0/prefill: inconclusive" in line
    assert judged.near


def test_a_flipped_id_with_a_gap_fails_and_is_named():
    judged = decoding.judge(*one_row([0, 3, 3 + GAP], [0, 3 + GAP, 3]), moved=1e-7)
    (difference,) = judged.compared.differences
    assert difference.path == "definition/row_0/prefill"
    assert difference.what == "id"
    assert difference.absolute == GAP
    for word in ("decoded 1", "arg-max of the plain forward pass 2", f"{GAP:.3g}"):
        assert word in difference.detail


def test_a_distance_that_rounding_does_not_explain_proves_nothing():
    judged = decoding.judge(*one_row([0, 3, 9], [0, 3.5, 9]), moved=1e-7)
    assert not judged.near
    assert judged.compared == parity.Comparison(1, 1)
    (line,) = judged.lines()
    assert "0.5" in line


def test_a_model_with_a_tie_is_proved_without_the_ids_that_tie():
    """Two ids with the same column of the head, but for a rounding."""
    prompt = decoding.draw_prompt(CONFIG, seed=0)
    answer = decoding.decode_greedily(sides()[0], params(), prompt)
    chosen = int(answer[0].ids[0])
    twin = (chosen + 1) % CONFIG.vocab_size
    head = params()["lm_head"]
    column = head[:, chosen] * (1 + np.finfo(np.float32).eps)
    tied = {**params(), "lm_head": head.at[:, twin].set(column)}
    tier = check(decoders.make_pair(CONFIG, tied), sides=sides())
    assert tier.status == "proved"
    assert any("row_0/prefill: inconclusive" in line for line in tier.details)
    everything = check(pair(), sides=sides()).compared
    assert tier.compared.elements == everything.elements - len(tier.details)


# In reports.


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    return parity.__main__.main([str(arg) for arg in argv], console), out.getvalue()


def test_the_command_has_the_tier(monkeypatch, tmp_path):
    monkeypatch.setattr(shared, "preset", lambda name: CONFIG)
    monkeypatch.setattr(decoders, "first_values", lambda config, seed: params())
    files = {name: tmp_path / name for name in ("json", "junit", "markdown")}
    status, out = main(
        "check",
        "qwen3-next-tiny",
        "--tiers=tree,decode",
        "--fail-on=decode",
        *(f"--{name}={file}" for name, file in files.items()),
    )
    # Bits are not looked at, but decide: the report says so.
    assert status == 1, out
    assert "bits is required, but was not run" in out
    data = json.loads(files["json"].read_text())
    jsonschema.validate(data, SCHEMA)
    assert data["required"] == ["tree", "bits", "decode"]
    tiers = {tier["tier"]: tier for tier in data["tiers"]}
    assert tiers["decode"]["status"] == "proved", out
    assert 'name="decode"' in files["junit"].read_text()
    assert "| decode | proved |" in files["markdown"].read_text()


def test_a_pair_of_modules_has_no_such_tier():
    with pytest.raises(parity.CheckError, match="tiers must be some of"):
        parity.check(None, None, np.ones(3), tiers=("tree", "decode"))


def test_moments_are_compared_leaf_by_leaf():
    moment = decoders.Moment(
        jnp.zeros((ROWS, 3)), jnp.zeros(ROWS, jnp.int32), decoders.new_cache(CONFIG)
    )
    other = moment._replace(cache=swapped(moment.cache))
    assert decoding.compare_moments(CONFIG, moment, other, "x").equal
    odd = moment._replace(logits=moment.logits.at[0, 0].set(jnp.nan))
    (difference,) = decoding.compare_moments(CONFIG, odd, odd, "x").differences
    assert (difference.path, difference.what) == ("x/logits", "not finite")
