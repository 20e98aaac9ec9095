"""The reference's numbers, in both frontends, scanned and not.

Tolerances stand in `parity.oracle`; `numpy64.npz` is an independent float64 model.
"""

import json
import shutil

import jax
import numpy as np
import pytest

import shared
import zoo_linen
import zoo_nnx
from parity import decoders, oracle
from shared.checkpoint import hf_names
from shared.layers import decoder_layer
from shared.trees import flatten
from tests.golden_models import (
    CASES,
    FRONTENDS,
    GOLDENS,
    QWEN3_NEXT,
    frontend,
    golden,
    in_layouts,
    layouts,
    load,
)

SECTIONS = (
    "fwd",
    "hidden65",
    "hidden5",
    "leftpad",
    "rightpad",
    "loss",
    "loss_masked",
    "mrope",
)
# Tracing and compiling are what costs, and a length is a program. A section runs in one
# of the layouts, whose layers are the same functions, the longest rows for some cases
# of each family. One case of Qwen3-Next runs every length scanned, and the mix, which
# has no period, runs them unscanned. Unscanned layers are differentiated in that case,
# too, and where keys go from layer to layer.
EVERY_LENGTH = ("qwen3_next_6l", "qwen3_next_dense_mix")
LONG = (*QWEN3_NEXT, "qwen3_5_moe_8l", "gemma4_dense", "deepseek_v3")
UNSCANNED_GRADIENTS = ("qwen3_next_6l", "gemma4_ple_kvshare")
# Other layouts of the same weights, with the cases that have them.
LAYOUTS = {
    "config_hub_style": (
        *QWEN3_NEXT,
        "gemma3_text",
        "gemma4_dense",
        "gemma4_moe",
        "gemma4_ple_kvshare",
        "qwen3_5_dense_8l",
        "deepseek_v3",
    ),
    "sharded": (
        "qwen3_next_8l",
        "qwen3_5_dense_8l",
        "qwen3_5_moe_8l",
        "gemma4_dense",
        "deepseek_v3",
    ),
    "fused_experts": ("qwen3_next_8l", "qwen3_5_moe_8l"),
    "hub_layout": ("qwen3_5_moe_vl_wrapper",),
}
# Fields of config.json that only the older spelling has.
OLDER = {
    "full_attention_interval",
    "global_head_dim",
    "sliding_window_pattern",
    "rope_theta",
}


def runs(case: str, scan_layers: bool, key: str) -> bool:
    """Whether a section of a golden runs in a layout."""
    if case in EVERY_LENGTH and scan_layers:
        return True
    if key.startswith("fwd/130/"):
        return scan_layers and case in LONG
    return key.startswith(("fwd/5/", "hidden5/")) != scan_layers


def test_every_section_of_every_golden_runs_in_some_layout():
    for case in CASES:
        left = {
            key
            for key in golden(case)
            if key.split("/")[0] in SECTIONS
            and not any(runs(case, scan_layers, key) for scan_layers in layouts(case))
        }
        assert {key.rpartition("/")[0] for key in left} == (
            set() if case in LONG else {"fwd/130"}
        )


@in_layouts(*CASES)
def test_logits_hidden_states_padding_and_losses_are_the_references(case, scan_layers):
    config, params = load(case, scan_layers)
    wanted = {
        key: value
        for key, value in golden(case).items()
        if key.split("/")[0] in SECTIONS and runs(case, scan_layers, key)
    }
    for name in FRONTENDS:
        apply = frontend(case, scan_layers, name)
        run = oracle.runner(apply, True)
        matches = list(oracle.compare_golden(config, params, apply, wanted, run))

        outside = [m for m in matches if not m.error <= m.tolerance]
        assert not outside, name
        assert {m.name for m in matches} == _comparable(wanted), name
        assert all(m.elements > 0 for m in matches), name
        if name == "linen":  # here, since the programs are those of above
            assert_as_near_to_float64_as_the_reference_is(case, scan_layers, run)


def assert_as_near_to_float64_as_the_reference_is(case, scan_layers, run):
    _, params = load(case, scan_layers)
    with np.load(GOLDENS / case / "numpy64.npz") as truth:
        for key in truth:
            if not runs(case, scan_layers, key):
                continue
            positions = golden(case).get(f"{key[:-7]}/position_ids_text_t_h_w")
            options = {} if positions is None else {"positions": positions[1:]}
            tokens = golden(case)[key.replace("logits", "input_ids")]
            mine = run(params, tokens, **options)
            error = np.abs(np.asarray(mine.logits) - truth[key])
            reference = np.abs(golden(case)[key] - truth[key])
            # Rounding differs; the amplification, which is the model's, does not.
            assert error.max() <= max(10 * reference.max(), 2e-4), key
            assert error.mean() <= 5e-5, key


@pytest.mark.parametrize(
    ("case", "scan_layers"),
    [
        (case, scan_layers)
        for case in CASES
        for scan_layers in layouts(case)
        if scan_layers or case in UNSCANNED_GRADIENTS
    ],
)
def test_every_gradient_is_the_references(case, scan_layers):
    config, params = load(case, scan_layers)
    wanted = {k: v for k, v in golden(case).items() if k.split("/")[0] == "grad"}
    inputs = {k: v for k, v in golden(case).items() if k.split("/")[0] == "loss"}
    tensors = [str(tensor) for tensor in wanted["grad/names"]]
    ignored = hf_names.ignored(config, tensors)
    for name in FRONTENDS:
        apply = frontend(case, scan_layers, name)
        matches = list(oracle.compare_gradients(config, params, apply, wanted | inputs))

        assert not [m for m in matches if not m.error <= m.tolerance], name
        assert {m.name for m in matches} == {
            f"grad/{kind}/{tensor}"
            for kind in ("norm", "proj")
            for tensor in tensors
            if tensor not in ignored
        }, name


def test_rematerialised_layers_that_lend_keys_have_the_references_gradients():
    """Keys go from layer to layer; the backward pass makes them again."""
    case = "gemma4_ple_kvshare"
    config, params = load(case, True)
    pair = decoders.make_pair(config.replace(remat_policy="full"), params)
    wanted = {k: v for k, v in golden(case).items() if k.split("/")[0] != "fwd"}
    for apply in (zoo_linen.as_function(pair.linen), zoo_nnx.as_function(pair.nnx)):
        matches = list(oracle.compare_gradients(config, params, apply, wanted))
        assert not [m for m in matches if not m.error <= m.tolerance]
        lent = [m for m in matches if m.name.startswith("grad/norm/model.layers.4.")]
        assert {m.name.split(".")[-2] for m in lent} >= {"k_proj", "v_proj", "k_norm"}


@pytest.mark.parametrize(
    "case",
    [*QWEN3_NEXT, "qwen3_5_moe_6l", "gemma4_moe", "gemma4_ple_kvshare", "deepseek_v3"],
)
def test_in_float64_nothing_is_left_of_the_difference(case):
    """The stored truth is rounded to float32, so it is known to 1e-6 of its size."""
    with jax.enable_x64(True):
        config, params = shared.checkpoint.load_hf(
            GOLDENS / case, param_dtype="float64"
        )
        config = config.replace(dtype="float64")
        pair = decoders.make_pair(config, params)
        run = jax.jit(zoo_nnx.as_function(pair.nnx))
        with np.load(GOLDENS / case / "numpy64.npz") as truth:
            tokens = golden(case)["fwd/65/input_ids"]
            logits = np.asarray(run(params, tokens).logits)
            assert logits.dtype == np.float64
            np.testing.assert_allclose(logits, truth["fwd/65/logits"], atol=4e-6)


@pytest.mark.parametrize(
    ("case", "layout"), [(c, layout) for layout, cs in LAYOUTS.items() for c in cs]
)
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_every_layout_gives_the_same_config_and_bytes(
    case, layout, scan_layers, tmp_path
):
    folder = GOLDENS / case / layout
    if layout == "config_hub_style":
        folder = tmp_path
        shutil.copy(GOLDENS / case / "model.safetensors", folder)
        shutil.copy(GOLDENS / case / "config_hub_style.json", folder / "config.json")
        assert OLDER & json.loads((folder / "config.json").read_text()).keys()
    config, params = shared.checkpoint.load_hf(folder, scan_layers=scan_layers)
    expected_config, expected = load(case, scan_layers)
    assert config == expected_config
    want, have = dict(flatten(expected)), dict(flatten(params))
    assert want.keys() == have.keys()
    for path in want:
        assert np.array_equal(want[path], have[path]), path


@pytest.mark.parametrize(
    "case",
    [
        "qwen3_next_dense_mix",
        "qwen3_5_moe_6l",
        "gemma4_moe",
        "gemma4_ple_kvshare",
        "deepseek_v3",
    ],
)
def test_mixers_and_feed_forwards_are_the_references(case):
    """`capture_intermediates` of Linen, against what the reference's modules gave.

    Of Gemma 4's experts the reference has nothing, of the dense layer beside them all.
    """
    config, params = load(case, False)
    model = decoders.make_pair(config, params).linen
    tokens = golden(case)["fwd/5/input_ids"]
    with jax.default_matmul_precision("highest"):
        _, state = jax.jit(
            lambda params, tokens: model.apply(
                {"params": params}, tokens, capture_intermediates=True
            )
        )(params, tokens)
    for i, kind in enumerate(config.layers):
        captured = state["intermediates"][f"layers_{i}"]
        mixer = decoder_layer.mixer_name(kind)
        for key, module in (("mixer", mixer), ("mlp", "mlp")):
            (called,) = captured[module]["__call__"]
            output = called[0] if isinstance(called, tuple) else called
            output = np.asarray(output).reshape(2, 5, -1)  # a scan of length one
            reference = golden(case)[f"hidden5/{key}_{i}"]
            np.testing.assert_allclose(output, reference, atol=oracle.FORWARD_ATOL)


def _comparable(wanted) -> set[str]:
    """Keys that hold results of the whole model; the rest are inputs or inner parts."""
    inputs = ("input_ids", "attention_mask", "position_ids", "_t_h_w", "labels")
    parts = ("mixer_", "mlp_")
    return {
        key
        for key in wanted
        if not key.endswith(inputs) and not key.split("/")[1].startswith(parts)
    }
