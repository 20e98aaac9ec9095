"""Adapters on disk: ours, those of a run, and PEFT's."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from safetensors.numpy import load_file

import parity.__main__
import shared
from parity.trees import compare_bytes
from shared import lora
from shared.checkpoint import CheckpointError, adapters
from shared.checkpoint.training import Manager
from shared.plan import insert
from shared.trees import flatten

CONFIG = shared.preset("qwen3-next-8l-tiny")
LORA = lora.LoraConfig(
    rank=2, alpha=8.0, targets=("self_attn/q_proj", "out_proj", "shared_expert/up_proj")
)


def drawn(config=CONFIG, options=LORA):
    random, tree = np.random.default_rng(0), {}
    for path, spec in flatten(lora.param_specs(config, options)):
        leaf = random.normal(size=spec.shape)
        if path[-1].endswith("_lora_scale"):
            leaf = np.full(spec.shape, options.scale)
        insert(tree, path, jnp.asarray(leaf, jnp.float32))
    return tree


def test_adapters_come_back_in_any_layout(tmp_path):
    own = drawn()
    adapters.save(tmp_path / "ours", CONFIG, own, LORA)
    config, options, back = adapters.load(tmp_path / "ours")
    assert options == LORA
    assert config.layers == CONFIG.layers
    assert compare_bytes(back, own, finite=True).equal
    config, _, flat = adapters.load(tmp_path / "ours", scan_layers=False)
    assert not config.scan_layers
    _, relaid = lora.relayout(CONFIG, own, scan_layers=False)
    assert compare_bytes(flat, relaid, finite=True).equal
    with pytest.raises(CheckpointError, match="holds adapters, not a model"):
        shared.checkpoint.load(tmp_path / "ours")


def test_a_run_of_adapters_goes_on(tmp_path):
    own = drawn()
    moments = optax.scale_by_adam().init(own)
    state = {"params": own, "opt_state": moments, "step": jnp.int32(3)}
    with Manager(tmp_path / "run", CONFIG, lora=LORA) as manager:
        manager.save(3, state)
        manager.wait()
        back = manager.restore(jax.tree.map(jnp.zeros_like, state))
        with pytest.raises(CheckpointError, match="missing: .*embed_tokens"):
            Manager(tmp_path / "other", CONFIG).save(1, state)
        with pytest.raises(CheckpointError, match="not those of the options"):
            other = dataclasses.replace(LORA, targets=("out_proj",))
            Manager(tmp_path / "third", CONFIG, lora=other).save(1, state)
    assert compare_bytes(back["params"], own, finite=True).equal
    assert int(back["step"]) == 3
    other = dataclasses.replace(LORA, alpha=4.0)
    with Manager(tmp_path / "run", CONFIG, lora=other) as manager:
        with pytest.raises(CheckpointError, match="lora: saved with"):
            manager.restore(state)
    _, options, back = adapters.load(tmp_path / "run")
    assert options == LORA
    assert compare_bytes(back, own, finite=True).equal


def test_peft_files_have_each_layer_by_its_published_name(tmp_path):
    own = drawn()
    adapters.save_peft(tmp_path / "peft", CONFIG, own, LORA, base_model="tiny")
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    runs, expected = own["layers"], {}
    for layer in range(8):
        block, place = divmod(layer, 4)
        run, slot = runs["local_layers"], (block, place)
        mixer, projection = "linear_attn", "out_proj"
        if place == 3:
            run, slot = runs["global_layer"], (block,)
            mixer, projection = "self_attn", "q_proj"
        above = f"base_model.model.model.layers.{layer}"
        for part in "AB":
            own_part = f"lora_{part.lower()}"
            for name, leaf in (
                (f"{mixer}.{projection}", run[mixer][f"{projection}_{own_part}"]),
                (
                    "mlp.shared_expert.up_proj",
                    run["mlp"]["shared_expert"][f"up_proj_{own_part}"],
                ),
            ):
                expected[f"{above}.{name}.lora_{part}.weight"] = leaf[slot].T
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(tensors[name], value)
    data = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (data["peft_type"], data["r"], data["lora_alpha"]) == ("LORA", 2, 8.0)
    assert data["target_modules"] == [
        "linear_attn.out_proj",
        "mlp.shared_expert.up_proj",
        "self_attn.q_proj",
    ]

    options, back = adapters.load_peft(tmp_path / "peft", CONFIG)
    assert (options.rank, options.alpha) == (2, 8.0)
    assert compare_bytes(back, own, finite=True).equal
    assert lora.param_specs(CONFIG, options).keys() == own.keys()


def test_what_peft_cannot_say_is_refused(tmp_path):
    options = dataclasses.replace(LORA, targets=("experts/up_proj",))
    own = drawn(options=options)
    with pytest.raises(CheckpointError, match="(?s)merge.*mlp/experts/up_proj of lay"):
        adapters.save_peft(tmp_path / "peft", CONFIG, own, options)
    assert not (tmp_path / "peft").exists()

    adapters.save_peft(tmp_path / "peft", CONFIG, drawn(), LORA)
    file = tmp_path / "peft/adapter_config.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"use_dora": True, "peft_type": "LOHA"}))
    with pytest.raises(CheckpointError, match="(?s)'LORA'.*use_dora must be False"):
        adapters.load_peft(tmp_path / "peft", CONFIG)
    file.write_text(json.dumps(data))
    other = shared.preset("qwen3.5-tiny")
    with pytest.raises(CheckpointError, match="(?s)has not.*shared_expert.up_proj"):
        adapters.load_peft(tmp_path / "peft", other)


def test_adapters_that_do_not_fit_are_not_saved(tmp_path):
    wrong = dataclasses.replace(LORA, rank=3)
    with pytest.raises(CheckpointError, match=r"must be \(2, 3, 48, 3\). Got .*48, 2"):
        adapters.save(tmp_path / "ours", CONFIG, drawn(), wrong)
    assert not (tmp_path / "ours").exists()


def test_a_merged_model_is_a_plain_checkpoint(tmp_path):
    params = jax.tree.map(
        lambda s: jnp.full(s.shape, 0.5, s.dtype), shared.abstract_params(CONFIG)
    )
    merged = lora.merge(CONFIG, params, drawn())
    shared.checkpoint.save_hf(tmp_path / "merged", CONFIG, merged)
    config, back = shared.checkpoint.load_hf(tmp_path / "merged")
    assert config.layers == CONFIG.layers
    assert compare_bytes(back, merged, finite=True).equal
    arguments = ["check", str(tmp_path / "merged"), "--tiers=tree"]
    assert parity.__main__.main(arguments, rich.console.Console(quiet=True)) == 0
