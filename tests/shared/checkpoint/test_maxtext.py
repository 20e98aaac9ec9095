"""MaxText's trees: what MaxText wrote is read, and written, byte for byte."""

import dataclasses
import functools
import itertools
import logging

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import shared
import zoo_linen
import zoo_nnx
from parity import decoders
from shared.checkpoint import hf_names
from shared.checkpoint.maxtext import (
    MaxTextLayout,
    below,
    detect_layout,
    maxtext_scheme,
)
from shared.checkpoint.scheme import Unit, check_tensors, units, zoo_scheme
from shared.config import DecoderConfig, LayerKind, MLPConfig
from shared.plan import insert
from shared.presets import hybrid_layers
from shared.stores import CheckpointError, from_tree, open_store, path_text
from shared.stores.reading import read_whole
from tests.shared.checkpoint.checkpoints import ALL_THREES
from tests.shared.checkpoint.maxtext_files import (
    MAXTEXT,
    assert_same,
    config_of,
    convert,
    load,
    shapes_of,
)

# A bound on how far other orders of summation move the logits, by number of layers.
LOGITS_ATOL = {6: 5e-4, 8: 1e-3}

SCANNED = MaxTextLayout("scanned")
SCANNED_0 = MaxTextLayout("scanned", 0)
UNSCANNED = MaxTextLayout("unscanned")
FLAT = MaxTextLayout("flat")
FLAT_0 = MaxTextLayout("flat", 0)
LAYOUTS = {
    6: (SCANNED, SCANNED_0, UNSCANNED),
    8: (SCANNED, SCANNED_0, UNSCANNED, FLAT, FLAT_0),
}
ZOO = (
    {"scan_layers": True, "param_scan_axis": 0},
    {"scan_layers": True, "param_scan_axis": 1},
    {"scan_layers": False},
)


def from_maxtext(config, layout, arrays):
    """The zoo's tree in the layout of the config."""
    source = maxtext_scheme(config, layout)
    return convert(config, source, zoo_scheme(config), arrays)


# Other layouts of what MaxText wrote, by loops over the axes in the README.


def is_local_stack(name):
    return name.startswith("decoder/layers/local_layers/")


def is_stack(name):
    return name.startswith(("decoder/layers/", "decoder/layers_remainder/"))


def with_axis_0(arrays):
    made = {}
    for name, array in arrays.items():
        made[name] = array
        if is_local_stack(name):
            size, blocks, local, *rest = array.shape
            made[name] = np.empty((blocks, local, size, *rest), array.dtype)
            for i, b, m in np.ndindex(size, blocks, local):
                made[name][b, m, i] = array[i, b, m]
        elif is_stack(name):
            size, blocks, *rest = array.shape
            made[name] = np.empty((blocks, size, *rest), array.dtype)
            for i, b in np.ndindex(size, blocks):
                made[name][b, i] = array[i, b]
    return made


def without_stacks(arrays):
    made = {name: array for name, array in arrays.items() if not is_stack(name)}
    for name, array in arrays.items():
        group, below_layer = name.split("/")[1], "/".join(name.split("/")[3:])
        if is_local_stack(name):
            for b, m in np.ndindex(array.shape[1:3]):
                layer = [array[i, b, m] for i in range(len(array))]
                made[f"decoder/layers_{4 * b + m}/{below_layer}"] = np.stack(layer)
        elif is_stack(name):
            for n in range(array.shape[1]):
                number = 4 + n if group == "layers_remainder" else 4 * n + 3
                layer = [array[i, n] for i in range(len(array))]
                made[f"decoder/layers_{number}/{below_layer}"] = np.stack(layer)
    return made


@functools.cache
def expected(num_layers, layout):
    """The fixture's weights in a layout."""
    scanned = load("scanned_params.npz" if num_layers == 6 else "scanned8_params.npz")
    if layout == SCANNED:
        return scanned
    if layout == UNSCANNED:
        return load("unscanned_params.npz") if num_layers == 6 else unscanned_8()
    old = scanned if layout == SCANNED_0 else load("old_layout_params.npz")
    return old if layout == FLAT else with_axis_0(old)


def unscanned_8():
    return without_stacks(load("scanned8_params.npz"))


def test_the_loops_of_these_tests_are_right():
    found = without_stacks(load("scanned_params.npz"))
    assert_same(found, load("unscanned_params.npz"))


# Every layout into every other.

every_size = pytest.mark.parametrize("num_layers", [6, 8])


@every_size
def test_every_layout_becomes_every_other_directly(num_layers):
    config, layouts = config_of(num_layers), LAYOUTS[num_layers]
    for source, target in itertools.product(layouts, repeat=2):
        made = convert(
            config,
            maxtext_scheme(config, source),
            maxtext_scheme(config, target),
            expected(num_layers, source),
        )
        assert_same(made, expected(num_layers, target))


@every_size
@pytest.mark.parametrize("zoo", ZOO, ids=str)
def test_every_layout_becomes_every_other_through_the_zoo(num_layers, zoo):
    config, layouts = config_of(num_layers).replace(**zoo), LAYOUTS[num_layers]
    schemes = {layout: maxtext_scheme(config, layout) for layout in layouts}
    trees = [from_maxtext(config, x, expected(num_layers, x)) for x in layouts]
    for tree in trees[1:]:
        assert_same(tree, trees[0])
    for layout in layouts:
        made = convert(config, zoo_scheme(config), schemes[layout], trees[0])
        assert_same(made, expected(num_layers, layout))


def test_the_old_layout_is_upgraded_to_the_new_one():
    old, config = load("old_layout_params.npz"), config_of(8)
    layout = detect_layout(shapes_of(old), config)
    assert layout == FLAT
    source, target = (maxtext_scheme(config, x) for x in (layout, SCANNED))
    assert_same(convert(config, source, target, old), load("scanned8_params.npz"))


def test_the_config_and_the_plan_of_the_zoo_do_not_matter():
    config = config_of(6)
    wanted = maxtext_scheme(config, SCANNED)
    for changes in (*ZOO, {"scan_period": 4}):
        scheme = maxtext_scheme(config.replace(**changes), SCANNED)
        assert scheme.shapes == wanted.shapes


@pytest.mark.parametrize("num_layers", [1, 3])
def test_less_than_a_period_is_all_remainder(num_layers):
    config = config_of(8).replace(layers=hybrid_layers(8)[:num_layers])
    shapes = maxtext_scheme(config, SCANNED).shapes
    stacks = {n: shape for n, shape in shapes.items() if n.startswith("decoder/layers")}
    assert all(n.startswith("decoder/layers_remainder/local_layers/") for n in stacks)
    name = "decoder/layers_remainder/local_layers/attention/A_log"
    assert stacks[name] == (4, num_layers)


def test_a_tied_model_has_no_logits_dense():
    tied = config_of(6).replace(tie_word_embeddings=True)
    names = maxtext_scheme(tied, SCANNED).shapes.keys()
    untied = maxtext_scheme(config_of(6), SCANNED).shapes.keys()
    assert untied - names == {"decoder/logits_dense/kernel"}


# The weights mean what they meant in MaxText.


def linen_logits(config, params, inputs):
    return zoo_linen.Decoder(config).apply({"params": params}, **inputs).logits


def nnx_logits(config, params, inputs):
    return zoo_nnx.from_params(config, params)(**inputs).logits


@every_size
@pytest.mark.parametrize("frontend", [linen_logits, nnx_logits])
def test_logits_are_maxtexts(num_layers, frontend):
    golden = load("logits.npz" if num_layers == 6 else "logits8.npz")
    config, params = config_of(num_layers), {}
    for name, array in from_maxtext(
        config, SCANNED, expected(num_layers, SCANNED)
    ).items():
        insert(params, tuple(name.split("/")), array)
    inputs = {key: golden[key] for key in ("tokens", "positions", "segment_ids")}
    run = jax.jit(frontend, static_argnums=0, compiler_options=decoders.quick_options())
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(run(config, params, inputs))
    assert logits.shape == golden["logits"].shape == (2, 32, 96)
    error = np.abs(logits - golden["logits"]).max()
    assert error <= LOGITS_ATOL[num_layers]


def test_hugging_face_names_are_those_of_maxtexts_own_mapping():
    config, hf = config_of(8), load_file(MAXTEXT / "scanned8_hf.safetensors")
    assert len(hf) == 209
    ours = maxtext_scheme(config, SCANNED)
    theirs = hf_names.scheme(config, hf_names.tensors(config, lambda name: False))
    scanned = load("scanned8_params.npz")
    assert_same(convert(config, ours, theirs, scanned), hf)
    assert_same(convert(config, theirs, ours, hf), scanned)


# Sizes that are all the same, and values that are all different.

# By path in a layer: our leaf, and MaxText's shape of one layer.
LINEAR = {
    "attention/in_proj_qkvz/kernel": ("linear_attn/in_proj_qkvz", (3, 36)),
    "attention/in_proj_ba/kernel": ("linear_attn/in_proj_ba", (3, 6)),
    "attention/conv1d/kernel": ("linear_attn/conv1d", (3, 1, 27)),
    "attention/A_log": ("linear_attn/A_log", (3,)),
    "attention/dt_bias": ("linear_attn/dt_bias", (3,)),
    "attention/norm/rms_norm/scale": ("linear_attn/norm", (3,)),
    "attention/out_proj/kernel": ("linear_attn/out_proj", (9, 3)),
}
FULL = {
    "attention/attention/query/kernel": ("self_attn/q_proj", (3, 3, 6)),
    "attention/attention/key/kernel": ("self_attn/k_proj", (3, 3, 3)),
    "attention/attention/value/kernel": ("self_attn/v_proj", (3, 3, 3)),
    "attention/attention/out/kernel": ("self_attn/o_proj", (9, 3)),
    "attention/attention/query_norm/scale": ("self_attn/q_norm", (3,)),
    "attention/attention/key_norm/scale": ("self_attn/k_norm", (3,)),
}
EVERY = {
    "input_layernorm/scale": ("input_layernorm", (3,)),
    "post_attention_layernorm/scale": ("post_attention_layernorm", (3,)),
    "mlp/routed_experts/gate/kernel": ("mlp/gate", (3, 3)),
    "mlp/routed_experts/wi_0": ("mlp/experts/gate_proj", (3, 3, 3)),
    "mlp/routed_experts/wi_1": ("mlp/experts/up_proj", (3, 3, 3)),
    "mlp/routed_experts/wo": ("mlp/experts/down_proj", (3, 3, 3)),
    "mlp/shared_expert/wi_0/kernel": ("mlp/shared_expert/gate_proj", (3, 3)),
    "mlp/shared_expert/wi_1/kernel": ("mlp/shared_expert/up_proj", (3, 3)),
    "mlp/shared_expert/wo/kernel": ("mlp/shared_expert/down_proj", (3, 3)),
    "mlp/shared_expert_gate/kernel": ("mlp/shared_expert_gate", (3, 1)),
}
OUTER = {
    "token_embedder/embedding": "embed_tokens",
    "decoder/decoder_norm/scale": "norm",
    "decoder/logits_dense/kernel": "lm_head",
}


@functools.cache
def threes(num_layers):
    """Three of everything: 12 layers are 3 blocks of 3 local layers and a global."""
    hf = ALL_THREES | {"num_hidden_layers": num_layers}
    return DecoderConfig.from_hf(hf).replace(scan_layers=False, mlp=None)


@functools.cache
def coded(num_layers):
    """A whole number for each entry of the model, by unit."""
    values, start = {}, 0
    for unit, shape in units(threes(num_layers)).items():
        size = int(np.prod(shape))
        values[unit] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    assert start < 2**24  # where float32 has all whole numbers
    return values


def unscanned_zoo(values):
    """The zoo's own tree with scan_layers=False."""
    return {
        unit.leaf if unit.layer is None else f"layers_{unit.layer}/{unit.leaf}": value
        for unit, value in values.items()
    }


def entry(values, layer, leaf, index):
    """The entry at MaxText's index into a layer's tensor."""
    if leaf == "self_attn/q_proj":
        row, head, column = index
        index = row, head * 6 + column
    elif leaf in ("self_attn/k_proj", "self_attn/v_proj"):
        row, head, column = index
        index = row, head * 3 + column
    elif leaf == "linear_attn/conv1d":
        tap, _, channel = index
        index = tap, channel
    return values[Unit(leaf, layer)][index]


def stacked(values, leaf, own, sizes, axis, layer_at):
    """A tensor, entry by entry; `layer_at` is the layer's number at a stack index."""
    shape = (*sizes, *own) if axis == 0 else (own[0], *sizes, *own[1:])
    tensor = np.empty(shape, np.float32)
    for index in np.ndindex(shape):
        count = len(sizes)
        if axis == 0:
            stack, inner = index[:count], index[count:]
        else:
            stack, inner = index[1 : 1 + count], (index[0], *index[1 + count :])
        tensor[index] = entry(values, layer_at(*stack), leaf, inner)
    return tensor


def coded_tree(num_layers, layout):
    """What MaxText has, by its README: block b and local layer m are layer 4 b + m."""
    runs = {
        "scanned": {
            "layers/local_layers": (LINEAR, (3, 3), lambda b, m: 4 * b + m),
            "layers/global_layer": (FULL, (3,), lambda b: 4 * b + 3),
            "layers_remainder/local_layers": (LINEAR, (3,), lambda m: 12 + m),
        },
        "flat": {
            "layers/layer_0": (LINEAR, (3,), lambda b: 4 * b),
            "layers/layer_1": (LINEAR, (3,), lambda b: 4 * b + 1),
            "layers/layer_2": (LINEAR, (3,), lambda b: 4 * b + 2),
            "layers/layer_3": (FULL, (3,), lambda b: 4 * b + 3),
        },
        "unscanned": {
            f"layers_{i}": (FULL if i % 4 == 3 else LINEAR, (), lambda i=i: i)
            for i in range(num_layers)
        },
    }[layout.name]
    if num_layers == 12:
        runs.pop("layers_remainder/local_layers", None)
    values = coded(num_layers)
    tree = {name: values[Unit(leaf, None)] for name, leaf in OUTER.items()}
    for run, (mixer, sizes, layer_at) in runs.items():
        for name, (leaf, own) in (mixer | EVERY).items():
            tree[f"decoder/{run}/{name}"] = stacked(
                values, leaf, own, sizes, layout.param_scan_axis, layer_at
            )
    return tree


@pytest.mark.parametrize(
    ("num_layers", "layout"),
    [
        (15, SCANNED),
        (15, SCANNED_0),
        (15, UNSCANNED),
        (12, SCANNED),
        (12, SCANNED_0),
        (12, FLAT),
        (12, FLAT_0),
    ],
    ids=str,
)
def test_every_entry_is_in_its_place_where_all_axes_are_equally_long(
    num_layers, layout
):
    config = threes(num_layers)
    zoo, wanted = unscanned_zoo(coded(num_layers)), coded_tree(num_layers, layout)
    scheme = maxtext_scheme(config, layout)
    assert_same(convert(config, zoo_scheme(config), scheme, zoo), wanted)
    assert_same(convert(config, scheme, zoo_scheme(config), wanted), zoo)


# What there is, and what is wrong with it.


@pytest.mark.parametrize(
    ("num_layers", "layout"),
    [(n, layout) for n, layouts in LAYOUTS.items() for layout in layouts],
    ids=str,
)
def test_the_layout_is_detected(num_layers, layout):
    shapes = shapes_of(expected(num_layers, layout))
    assert detect_layout(shapes, config_of(num_layers)) == layout


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("scanned_orbax", "items:params/params"),
        ("scanned_train_orbax", "7/items:params/params"),
        ("scanned_params.npz", "scanned_params.npz"),
    ],
)
def test_the_tree_is_found_in_what_maxtext_wrote(path, found):
    store = below(open_store(MAXTEXT / path))
    assert store.path.endswith(found)
    arrays = {
        path_text(path): read_whole(leaf, path_text(path))
        for path, leaf in store.leaves.items()
    }
    assert detect_layout(shapes_of(arrays), config_of(6)) == SCANNED
    check_tensors(shapes_of(arrays), maxtext_scheme(config_of(6), SCANNED))
    assert_same(arrays, load("scanned_params.npz"))


def test_the_tree_is_found_below_one_params():
    tree = {"params": {"decoder": {"x": np.zeros(2)}, "y": np.ones(1)}}
    assert list(below(from_tree(tree)).leaves) == [("decoder", "x"), ("y",)]


def test_no_tree_of_maxtext():
    tree = {"params": {"params": {"encoder": np.zeros(2)}}, "opt_state": np.ones(1)}
    with pytest.raises(CheckpointError, match="It has opt_state, params") as error:
        below(from_tree(tree))
    assert "params/params" in str(error.value)


def test_everything_that_does_not_fit_is_listed():
    shapes = shapes_of(load("scanned_params.npz"))
    global_layer = "decoder/layers/global_layer"
    del shapes["token_embedder/embedding"]
    shapes["decoder/extra/kernel"] = (2, 3)
    shapes[f"{global_layer}/mlp/routed_experts/wo"] = (1, 4, 16, 32)
    with pytest.raises(CheckpointError) as error:
        check_tensors(shapes, maxtext_scheme(config_of(6), SCANNED))
    assert error.value.problems == (
        "missing: token_embedder/embedding (96, 32)",
        "unexpected: decoder/extra/kernel (2, 3)",
        f"wrong shape: {global_layer}/mlp/routed_experts/wo must be (4, 1, 16, 32). "
        "Got (1, 4, 16, 32)",
    )
    assert "1 missing, 1 unexpected, 1 wrong shape" in str(error.value)


def test_the_flat_layout_has_no_remainder():
    with pytest.raises(CheckpointError) as error:
        maxtext_scheme(config_of(6), FLAT)
    assert "num_layers=6 is 1 x 4 layers and 2 more" in str(error.value)
    assert "'flat'" in str(error.value)
    with pytest.raises(CheckpointError, match="num_layers=6"):
        detect_layout(shapes_of(load("old_layout_params.npz")), config_of(6))


def test_an_axis_that_no_shape_tells_has_to_be_given():
    for layout in (SCANNED, SCANNED_0):
        shapes = dict(maxtext_scheme(threes(12), layout).shapes)
        # Of the others some have an axis that is not 3 long.
        alike = {name: s for name, s in shapes.items() if set(s) == {3}}
        assert len(alike) > 20
        with pytest.raises(CheckpointError, match="param_scan_axis is 0 or 1"):
            detect_layout(alike, threes(12))
        axis = layout.param_scan_axis
        assert detect_layout(alike, threes(12), axis) == layout
        assert detect_layout(shapes, threes(12)) == layout
        assert detect_layout(shapes, threes(12), axis) == layout
        with pytest.raises(CheckpointError) as error:
            detect_layout(shapes, threes(12), 1 - axis)
        assert f"={1 - axis} is given" in str(error.value)
        assert f"those of {axis}" in str(error.value)


def test_shapes_that_contradict_the_config_are_named_with_both_values():
    with pytest.raises(CheckpointError) as error:
        detect_layout(shapes_of(load("scanned8_params.npz")), config_of(6))
    assert "1 x 4 layers and 2 more" in str(error.value)
    assert (
        "decoder/layers/global_layer/attention/attention/key/kernel must be "
        "(1, 32, 2, 16) or (32, 1, 2, 16). Got (32, 2, 2, 16)"
    ) in error.value.problems


def test_tensors_of_both_axes_are_no_layout():
    arrays = dict(expected(8, SCANNED))
    name = "decoder/layers/local_layers/attention/A_log"
    arrays[name] = expected(8, SCANNED_0)[name]
    with pytest.raises(CheckpointError) as error:
        detect_layout(shapes_of(arrays), config_of(8))
    assert error.value.problems == (
        f"{name} must be (2, 3, 4) or (4, 2, 3). Got (2, 3, 4)",
    )
    assert "33 tensors 32 contradict it with param_scan_axis=0 and 1 with 1" in str(
        error.value
    )


def test_names_of_two_layouts_are_named():
    shapes = shapes_of(load("scanned8_params.npz") | load("old_layout_params.npz"))
    with pytest.raises(CheckpointError) as error:
        detect_layout(shapes, config_of(8))
    scanned, flat = error.value.problems
    assert scanned.startswith("scanned: decoder/layers/global_layer/")
    assert flat.startswith("flat: decoder/layers/layer_0/")


def test_names_of_no_layout():
    with pytest.raises(CheckpointError, match="There are: layers/x, norm"):
        detect_layout({"norm": (3,), "layers/x": (3,)}, config_of(8))


def test_an_axis_that_does_not_exist():
    with pytest.raises(CheckpointError, match="0 or 1. Got 2"):
        MaxTextLayout("scanned", 2)


def test_models_that_maxtext_does_not_have():
    config = config_of(6)
    full = LayerKind("full_attention", "moe")
    dense = LayerKind("linear_attention", "dense")
    sliding = LayerKind("sliding_attention", "moe")
    other = config.replace(
        family="other",
        layers=(*config.layers, dense, full, sliding, full),
        attention=dataclasses.replace(config.attention, use_bias=True),
        sliding_attention=dataclasses.replace(config.attention, window=4),
        mlp=MLPConfig(32, 16),
    )
    with pytest.raises(CheckpointError) as error:
        maxtext_scheme(other, SCANNED)
    family, bias, *rest = error.value.problems
    assert family.startswith("family='other'")
    assert bias.startswith("attention.use_bias=True")
    assert [line.split(":")[0] for line in rest] == [
        "layer 6 is linear_attention+dense",
        "layer 8 is sliding_attention+moe",
        "layer 9 is full_attention+moe",
    ]
    assert "every 4th" in rest[-1]


def test_a_wider_shared_expert_is_told(caplog):
    with caplog.at_level(logging.WARNING, "shared"):
        maxtext_scheme(config_of(6), SCANNED)
        assert not caplog.records
        maxtext_scheme(shared.preset("qwen3-next-tiny"), SCANNED)
    assert "16. Here it has 24" in caplog.text
