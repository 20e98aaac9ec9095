"""Errors of ports, planted in the examples: each is caught, by the tier that should.

The tree tier says that something is there which should not be, or the reverse. What has
the right names and shapes but computes something else gets past it; bits find that, and
the tolerance tier says that no rounding explains it. The paths say where it happens.
The program tier is left out: programs of these pairs differ even without an error.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import parity
from tests.examples import pairs

UNEQUAL_TREES = {"tree": "failed", "bits": "skipped"}
ANOTHER_FUNCTION = {"tree": "proved", "bits": "failed", "tolerance": "failed"}
ANOTHER_DTYPE = {"tree": "proved", "bits": "failed"}


class Error(NamedTuple):
    """A planted error.

    Attributes:
      example: in which.
      calls: what is called.
      expected: status of each tier.
      where: pattern of all paths that the first failed tier names.
      plant: changes the NNX model, or what it is made of.
      rules: changes the rule file.
    """

    example: str
    calls: tuple[str, ...]
    expected: dict[str, str]
    where: str
    plant: Callable[[Any, pytest.MonkeyPatch], None] = lambda model, patch: None
    rules: Callable[[str], str] = lambda text: text


def pad_as_torch_does(cnn, patch):
    # "SAME" gives the same shape, and pads an even size on one side only.
    cnn.blocks[1].conv1.padding = ((1, 1), (1, 1))


def take_epsilon_of_torch(translator, patch):
    translator.encoder.final_norm.epsilon = 1e-5  # Flax has 1e-6


def take_other_momentum(cnn, patch):
    cnn.stem_norm.momentum = 0.99


def leave_out_bias(tagger, patch):
    cell = tagger.layers[0].forward_rnn.cell
    cell.hi = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))


def exchange_height_and_width(rules):
    old = "nnx = 'params/stem/kernel'\n"
    assert old in rules
    return rules.replace(old, old + "transpose = [1, 0, 2, 3]\n")


def exchange_directions(rules):
    other = {"forward_rnn": "backward_rnn", "backward_rnn": "forward_rnn"}
    return re.sub("|".join(other), lambda found: other[found[0]], rules)


class NormedDropout(nnx.Module):
    def __init__(self, dropout):
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.dropout = dropout

    def __call__(self, x):
        return self.dropout(self.norm(x))


def add_norm(cnn, patch):
    cnn.dropout = NormedDropout(cnn.dropout)


def take_exact_gelu(translator, patch):
    patch.setattr(nnx, "gelu", functools.partial(jax.nn.gelu, approximate=False))


def drop_more(cnn, patch):
    cnn.dropout.rate = 0.5


def see_the_next_token(translator, patch):
    def mask(x):
        ones = jnp.ones((*x.shape, x.shape[-1]))
        return jnp.tril(ones, k=1)[:, None]

    patch.setattr(nnx, "make_causal_mask", mask)


def untie_embedding(translator, patch):
    translator.decoder.embed = nnx.Embed(13, 8, rngs=nnx.Rngs(0))


def compute_inside_in_bfloat16(translator, patch):
    translator.encoder.layers[0].mlp.up.dtype = jnp.bfloat16


def give_bfloat16(cnn, patch):
    cnn.head.dtype = jnp.bfloat16


def begin_cache_anew(translator, patch):
    own = type(translator.decoder).step

    def step(decoder, token, memory, source):
        decoder.init_cache(token.shape[0])
        return own(decoder, token, memory, source)

    patch.setattr(type(translator.decoder), "step", step)


ERRORS = {
    "padding": Error("cnn", ("eval",), ANOTHER_FUNCTION, "outputs", pad_as_torch_does),
    "epsilon": Error(
        "translator", ("encode",), ANOTHER_FUNCTION, "outputs", take_epsilon_of_torch
    ),
    "momentum": Error(
        "cnn",
        ("train", "eval"),
        ANOTHER_FUNCTION,
        r"train/step_[01]/state/batch_stats/BatchNorm_0/(mean|var)",
        take_other_momentum,
    ),
    "missing bias": Error(
        "tagger",
        ("eval",),
        UNEQUAL_TREES,
        "params/LSTMCell_0/hi/bias",
        leave_out_bias,
    ),
    "swapped axes": Error(
        "cnn", ("eval",), ANOTHER_FUNCTION, "outputs", rules=exchange_height_and_width
    ),
    "extra norm": Error(
        "cnn",
        ("eval",),
        UNEQUAL_TREES,
        "(params|batch_stats)/dropout/norm/.*",
        add_norm,
    ),
    "activation": Error(
        "translator", ("encode",), ANOTHER_FUNCTION, "outputs", take_exact_gelu
    ),
    "dropout rate": Error(
        "cnn",
        ("train", "eval"),
        ANOTHER_FUNCTION,
        "train/step_[01]/outputs",
        drop_more,
    ),
    "mask off by one": Error(
        "translator",
        ("train", "encode"),
        ANOTHER_FUNCTION,
        "train/outputs",
        see_the_next_token,
    ),
    "tied weight untied": Error(
        "translator",
        ("encode",),
        UNEQUAL_TREES,
        "params/decoder/embed/embedding",
        untie_embedding,
    ),
    "bfloat16 inside": Error(
        "translator",
        ("encode",),
        ANOTHER_FUNCTION,
        "outputs",
        compute_inside_in_bfloat16,
    ),
    "bfloat16 outside": Error(
        "cnn", ("eval",), ANOTHER_DTYPE, "outputs", give_bfloat16
    ),
    "stale cache": Error(
        "translator",
        ("decode",),
        ANOTHER_FUNCTION,
        "step_[12]/(outputs|state/cache/decoder/.*)",
        begin_cache_anew,
    ),
    "directions exchanged": Error(
        "tagger", ("eval",), ANOTHER_FUNCTION, "outputs", rules=exchange_directions
    ),
}


def check(error, patch):
    pair = pairs.load(error.example)

    def make(rngs):
        model = pair.nnx_model.make(rngs)
        error.plant(model, patch)
        return model

    return pairs.check(
        error.example,
        make,
        call=[
            # Gradients cost most of the time and are not needed for any of these.
            parity.Call(**{**vars(call), "gradient": False})
            for call in pair.inputs.calls()
            if call.name in error.calls
        ],
        rules=parity.Rules.parse(error.rules(pair.rules)),
        tiers=("tree", "bits", "tolerance"),
        examples=1,
    )


@pytest.mark.parametrize("name", ERRORS)
def test_planted_error_is_caught_by_its_tier(name, monkeypatch):
    error = ERRORS[name]
    report = check(error, monkeypatch)
    assert {tier.name: tier.status for tier in report.tiers} == error.expected
    assert report.verdict == "NOT EQUAL"
    [caught] = (failure.tier for failure in report.failures[:1])
    assert error.expected[caught] == "failed"
    paths = [difference.path for difference in report.tier(caught).differences]
    assert paths
    assert [path for path in paths if not re.fullmatch(error.where, path)] == []


def test_each_call_without_gradient_is_proved_where_nothing_is_planted(monkeypatch):
    calls = {"cnn": ("train", "eval"), "translator": ("train", "encode", "decode")}
    for example, names in calls.items():
        report = check(Error(example, names, {}, ""), monkeypatch)
        assert report.verdict == "proved"


def test_loose_tolerance_passes_the_extra_norm(monkeypatch):
    make = pairs.load("cnn").nnx_model.make
    images = jax.random.normal(jax.random.key(0), (4, 6, 6, 3))
    model, planted = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    add_norm(planted, monkeypatch)
    outputs = []
    for each in (model, planted):
        each.eval()
        outputs.append(np.asarray(each(images)))
    assert (outputs[0] != outputs[1]).any()
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
