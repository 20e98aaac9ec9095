"""A fault in one of the two frontends is found, and named by its path and no other."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import nnx
from hypothesis import strategies as st

import parity
import parity.__main__
import shared
import zoo_nnx
from parity import decoders
from parity.zoo import TIERS
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny

# v_proj is square; a full and a local layer, repeated and scanned.
CONFIG = qwen3_next_tiny(4).replace(
    layers=tuple(
        LayerKind(mixer, "dense") for mixer in ("linear_attention", "full_attention")
    )
    * 2
)
CHEAP = qwen3_next_tiny(1).replace(layers=(LayerKind("full_attention", "dense"),))


def leaf_at(model, path):
    *above, name = path.split("/")
    for step in above:
        model = getattr(model, step)
    return model, name


def change(value):
    """A plant that changes the value of a leaf."""

    def plant(model, path):
        variable = getattr(*leaf_at(model, path))
        variable.set_value(value(variable.get_value()))

    return plant


def next_number(x):
    """The first entry moved by one unit in the last place."""
    flat = x.reshape(-1)
    bits = jax.lax.bitcast_convert_type(flat[:1], jnp.uint32) ^ jnp.uint32(1)
    moved = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return flat.at[:1].set(moved).reshape(x.shape)


def rename(model, path):
    owner, name = leaf_at(model, path)
    setattr(owner, f"{name}s", getattr(owner, name))
    delattr(owner, name)


def swap_axis_names(model, path):
    variable = getattr(*leaf_at(model, path))
    names = list(variable.out_sharding)
    names[-2:] = reversed(names[-2:])
    variable.set_metadata(out_sharding=tuple(names))


def swap_last(x):
    return jnp.swapaxes(x, -1, -2)


# fault: plant, leaf below a layer, the tier that sees it, what differs.
FAULTS = {
    "perturbed": (change(next_number), "self_attn/q_proj", "value"),
    "transposed": (change(swap_last), "self_attn/v_proj", "value"),
    "dtype": (change(lambda x: x.astype(jnp.bfloat16)), "self_attn/k_proj", "dtype"),
    "axes": (swap_axis_names, "mlp/up_proj", "axes"),
    "renamed": (rename, "mlp/down_proj", "missing"),
}
faults = pytest.mark.parametrize("fault", FAULTS)


def check_named(tiers, path, what):
    """Something failed; all that failed is at `path` (or its new name)."""
    found = {(d["path"], d["what"]) for tier in tiers for d in tier["differences"]}
    assert found
    assert {name for name, _ in found} <= {path, f"{path}s"}
    assert path in {name for name, _ in found}
    assert what in {sort for _, sort in found}


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    return parity.__main__.main(argv, console), out.getvalue()


@pytest.mark.parametrize(
    ("fault", "tiers"),
    [*((fault, "tree,init") for fault in FAULTS), ("renamed", "tree,init,bits")],
)
def test_a_fault_in_the_constructor_is_named(fault, tiers, monkeypatch, tmp_path):
    """By the command, as a user would find it."""
    plant, leaf, what = FAULTS[fault]
    path = f"layers/global_layer/{leaf}"
    build = zoo_nnx.Decoder.__init__

    def faulty(self, *args, **kwargs):
        build(self, *args, **kwargs)
        plant(self, path)

    monkeypatch.setattr(zoo_nnx.Decoder, "__init__", faulty)
    monkeypatch.setattr(shared, "preset", lambda name: CONFIG)
    report = tmp_path / "report.json"
    status, out = main(
        "check", "qwen3-next-tiny", f"--tiers={tiers}", f"--json={report}"
    )
    assert status == 1
    assert path in out
    assert "NOT EQUAL" in out
    check_named(json.loads(report.read_text())["tiers"], path, what)


@faults
def test_a_fault_in_what_a_model_holds_is_named(fault):
    plant, leaf, what = FAULTS[fault]
    path = f"layers_0/{leaf}"
    config = CHEAP.replace(scan_layers=False)
    params = shared.init_params(jax.random.key(0), config)
    pair = decoders.make_pair(config, params)
    plant(pair.nnx, path)
    report = parity.check_pair(pair, ("tree", "bits"))
    assert not report.ok
    check_named(report.as_dict()["tiers"], path, what)
    assert path in report.to_markdown()


def test_a_fault_in_the_mathematics_of_one_frontend_is_found():
    """Weights are equal; logits and what depends on them are not."""
    config = CHEAP.replace(scan_layers=False)
    params = shared.init_params(jax.random.key(0), config)
    pair = decoders.make_pair(config, params)
    assert parity.check_pair(pair, ("tree", "bits")).ok

    class Doubled(zoo_nnx.MLP):
        def __call__(self, x):
            return 2 * super().__call__(x)

    faulty = Doubled(config.mlp, rngs=nnx.Rngs(0))
    nnx.update(faulty, nnx.state(pair.nnx.layers_0.mlp))
    pair.nnx.layers_0.mlp = faulty
    report = parity.check_pair(pair, ("tree", "bits"))
    assert report.tier("tree").status == "proved"
    differences = {d.path: d for d in report.tier("bits").differences}
    assert {"logits", "loss_total"} <= set(differences)
    assert "ulps" in differences["logits"].detail
    assert "embed_tokens" not in differences  # the weights themselves


def test_a_drawn_input_that_differs_is_shown_with_the_command_that_draws_it(
    monkeypatch,
):
    config = CHEAP.replace(scan_layers=False)
    params = shared.init_params(jax.random.key(0), config)
    pair = decoders.make_pair(config, params)
    drawn = decoders.Drawn(3, 4, "again: parity check x --draw=4 --seed=3")
    tier = decoders.check_bits(pair, drawn)
    assert (tier.status, tier.examples, tier.details) == ("proved", 4, ())

    class Doubled(zoo_nnx.MLP):
        def __call__(self, x):
            return 2 * super().__call__(x)

    faulty = Doubled(config.mlp, rngs=nnx.Rngs(0))
    nnx.update(faulty, nnx.state(pair.nnx.layers_0.mlp))
    pair.nnx.layers_0.mlp = faulty
    (only,) = decoders.draw_examples(config, 0, 1)
    # There is but one: making it smaller would take long here.
    monkeypatch.setattr(decoders, "example_strategy", lambda _: st.just(only))
    tier = decoders.check_bits(pair, drawn)
    assert tier.status == "failed"
    shown, command = tier.details
    assert command == drawn.replay
    assert shown == "smallest example that differs: " + " ".join(repr(only).split())


def test_a_model_that_breaks_in_both_frontends_proves_nothing():
    config = CHEAP.replace(scan_layers=False)
    params = shared.init_params(jax.random.key(0), config)
    params["norm"] = params["norm"].at[0].set(np.nan)
    report = parity.check_pair(decoders.make_pair(config, params), ("bits",))
    assert not report.ok
    assert ("logits", "not finite") in {
        (d.path, d.what) for d in report.tier("bits").differences
    }


def test_tiers_that_are_proved_stand_beside_those_that_are_not():
    assert TIERS == ("tree", "init", "program", "bits", "decode", "oracle")
    one = parity.compare_bytes({"a": np.ones(2)}, {"a": np.ones(2)})
    other = parity.compare_bytes({"a": np.ones(2)}, {"a": np.zeros(2)})
    report = parity.Report("x", (parity.Tier("tree", one), parity.Tier("bits", other)))
    assert not report.ok
    assert [tier.status for tier in report.tiers] == ["proved", "failed"]
