"""Conversion: any format into any other, byte for byte, or a message that says why."""

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import shared
import zoo_linen
import zoo_nnx
from shared.checkpoint import CheckpointError, hf_names, load_hf, native
from shared.checkpoint.convert import Target, convert, plan_conversion
from shared.checkpoint.maxtext import MaxTextLayout, maxtext_scheme
from shared.checkpoint.scheme import Conversion, units, zoo_scheme
from shared.checkpoint.source import open_source
from shared.checkpoint.zoo_layouts import detect, flat_scheme
from shared.config import DecoderConfig
from shared.stores import open_store
from shared.stores.folders import new_folder
from shared.stores.orbax_writer import write_array
from shared.stores.reading import read_whole
from shared.stores.tree import array_leaf
from shared.trees import flatten
from tests.shared.checkpoint.checkpoints import (
    ALL_THREES,
    GOLDENS,
    NAMES,
    copy_golden,
    read,
    tensor_shapes,
    unique_tensors,
    write,
)
from tests.shared.checkpoint.maxtext_files import config_of

MAXTEXT = GOLDENS.parent / "maxtext"
LAYOUTS = {
    "scanned": {},
    "axis 1": {"param_scan_axis": 1},
    "unscanned": {"scan_layers": False},
    "another period": {"scan_period": 8},
    "padded": {"vocab_padding": 5},
}


def run(source, folder, target, **options):
    """Converts; returns the folder."""
    opened = source if hasattr(source, "tensors") else open_source(source, **options)
    convert(plan_conversion(opened, target), folder)
    return folder


def assert_same_files(folder, other):
    """Every tensor, its dtype and its bytes, and config.json."""
    one, two = read(folder), read(other)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and tensor.shape == two[name].shape
        assert tensor.tobytes() == two[name].tobytes(), name
    texts = [json.loads((f / "config.json").read_text()) for f in (folder, other)]
    assert texts[0] == texts[1]


def tree_of(folder):
    """The arrays of one of our checkpoints, as stock orbax restores them."""
    restored = orbax.checkpoint.PyTreeCheckpointer().restore(folder)
    return {"/".join(path): leaf for path, leaf in flatten(restored["params"])}


# -- Hugging Face and back ------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_comes_back_byte_for_byte(name, layout, tmp_path):
    if layout == "another period" and name != "qwen3_next_8l":
        layout = "scanned"
    golden = GOLDENS / name
    zoo = run(golden, tmp_path / "zoo", Target("zoo", LAYOUTS[layout]))
    assert_same_files(run(zoo, tmp_path / "hf", Target("hf")), golden)


@pytest.mark.parametrize("variant", ["fused_experts", "sharded"])
def test_experts_come_back_as_the_source_had_them(variant, tmp_path):
    golden = GOLDENS / "qwen3_next_8l" / variant
    zoo = run(golden, tmp_path / "zoo", Target("zoo", {"param_scan_axis": 1}))
    assert_same_files(run(zoo, tmp_path / "hf", Target("hf")), golden)
    fused = variant == "fused_experts"
    other = run(zoo, tmp_path / "other", Target("hf", fused_experts=not fused))
    expected = GOLDENS / "qwen3_next_8l" / ("" if fused else "fused_experts")
    assert read(other).keys() == read(expected).keys()
    for tensor, value in read(expected).items():
        assert read(other)[tensor].tobytes() == value.tobytes()


def test_the_frontends_load_what_was_converted(tmp_path):
    """The same tree as `load_hf` gives, and as both models have."""
    golden = GOLDENS / "qwen3_next_6l"
    zoo = run(golden, tmp_path / "zoo", Target("zoo"))
    config, params = load_hf(golden)
    expected = {"/".join(path): np.asarray(leaf) for path, leaf in flatten(params)}
    stored = tree_of(zoo)
    assert stored.keys() == expected.keys()
    for path, leaf in expected.items():
        assert stored[path].tobytes() == leaf.tobytes()
    again, loaded = shared.checkpoint.load(zoo)
    assert again == config
    model = zoo_nnx.from_params(again, loaded)
    linen = jax.eval_shape(
        zoo_linen.Decoder(again).init, jax.random.key(0), np.zeros((1, 2), np.int32)
    )
    for tree in (zoo_nnx.to_params(model), linen["params"]):
        assert {"/".join(p): leaf.shape for p, leaf in flatten(tree)} == {
            path: leaf.shape for path, leaf in expected.items()
        }


# -- the table of layouts -------------------------------------------------------------


def nested(config, tensors):
    """Every leaf by a slow loop over blocks, layers and experts.

    A global layer stands at [block], a local one at [block][local]; of experts the
    expert comes first where the stack axes stand at 1.
    """
    period = config.plan.groups[0].period
    axis = config.param_scan_axis
    leaves = {}
    for unit, shape in units(config).items():
        if unit.layer is None:
            continue
        block, place = divmod(unit.layer, period)
        blocks = config.num_layers // period
        group = "layers" if block < blocks else "layers_remainder"
        run_name = "global_layer" if place == period - 1 else "local_layers"
        locals_ = period - 1 if block < blocks else config.num_layers % period
        sizes, slot = [], []
        if block < blocks:
            sizes, slot = [blocks], [block]
        if run_name == "local_layers":
            sizes, slot = [*sizes, locals_], [*slot, place]
        at = min(axis, len(shape))
        path = f"{group}/{run_name}/{unit.leaf}"
        full = (*shape[:at], *sizes, *shape[at:])
        leaf = leaves.setdefault(path, np.full(full, -1.0, np.float32))
        value = of_hugging_face(unit, shape, tensors)
        for index in np.ndindex(*shape):
            leaf[(*index[:at], *slot, *index[at:])] = value(index)
    return leaves


def of_hugging_face(unit, shape, tensors):
    """Gives an entry of a unit from the tensors, by its index in the unit."""
    above = f"model.layers.{unit.layer}."
    name = unit.leaf.replace("/", ".")
    if "experts/" in unit.leaf and "shared" not in unit.leaf:
        *_, projection = unit.leaf.split("/")
        fused = tensors.get(f"{above}mlp.experts.gate_up_proj")
        if fused is None:
            return lambda index: tensors[
                f"{above}mlp.experts.{index[0]}.{projection}.weight"
            ][index[2], index[1]]
        if projection == "down_proj":
            down = tensors[f"{above}mlp.experts.down_proj"]
            return lambda index: down[index[0], index[2], index[1]]
        half = fused.shape[1] // 2 * (projection == "up_proj")
        return lambda index: fused[index[0], half + index[2], index[1]]
    if unit.leaf.endswith("conv1d"):
        tensor = tensors[f"{above}{name}.weight"]
        return lambda index: tensor[index[1], 0, index[0]]
    tensor = tensors.get(f"{above}{name}.weight", tensors.get(f"{above}{name}"))
    if len(shape) == 1:
        return lambda index: tensor[index]
    return lambda index: tensor[index[1], index[0]]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_every_row_of_the_table_where_all_axes_are_equal(fused, axis, tmp_path):
    """Coded values; lazy and eager loading; nesting as both models have it."""
    given = ALL_THREES | {"num_hidden_layers": 15}  # three blocks of 3 + 1, and three
    tensors = unique_tensors(tensor_shapes(given, fused_experts=fused))
    folder = write(tmp_path / "hf", given, tensors)
    config = DecoderConfig.from_hf(given).replace(param_scan_axis=axis)
    expected = nested(config, tensors)
    lazy = tree_of(
        run(folder, tmp_path / "zoo", Target("zoo", {"param_scan_axis": axis}))
    )
    eager = {
        "/".join(p): x for p, x in flatten(load_hf(folder, param_scan_axis=axis)[1])
    }
    assert expected.keys() == {path for path in lazy if path.startswith("layers")}
    for path, leaf in expected.items():
        np.testing.assert_array_equal(lazy[path], leaf, path)
        assert lazy[path].tobytes() == np.asarray(eager[path]).tobytes()

    nnx_model = nnx.eval_shape(lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0)))
    linen_model = jax.eval_shape(
        zoo_linen.Decoder(config).init, jax.random.key(0), np.zeros((1, 2), np.int32)
    )
    for tree in (zoo_nnx.to_params(nnx_model), linen_model["params"]):
        depths = {"/".join(path): leaf.shape for path, leaf in flatten(tree)}
        assert {path: depths[path] for path in expected} == {
            path: leaf.shape for path, leaf in expected.items()
        }
    assert_same_files(run(tmp_path / "zoo", tmp_path / "again", Target("hf")), folder)


@settings(max_examples=25)
@given(
    size=st.integers(2, 3),
    blocks=st.integers(1, 3),
    locals_=st.integers(1, 3),
    rest=st.integers(0, 2),
    axis=st.integers(0, 1),
    fused=st.booleans(),
    via=st.sampled_from(["zoo", "unscanned", "maxtext", "maxtext unscanned"]),
)
def test_any_nesting_comes_back(size, blocks, locals_, rest, axis, fused, via):
    """Sizes drawn so that many are equal: a wrong axis then has the right shape."""
    given = {
        name: size if isinstance(value, int) and value == 3 else value
        for name, value in ALL_THREES.items()
    }
    given |= {
        "num_hidden_layers": blocks * (locals_ + 1) + min(rest, locals_),
        "full_attention_interval": locals_ + 1,
        "linear_num_value_heads": size,
        "num_key_value_heads": size,
        "partial_rotary_factor": 1.0 if size == 2 else 0.67,
    }
    tensors = unique_tensors(tensor_shapes(given, fused_experts=fused))
    config = DecoderConfig.from_hf(given)
    middle = {
        "zoo": lambda c: zoo_scheme(c),
        "unscanned": lambda c: zoo_scheme(c.replace(scan_layers=False)),
        "maxtext": lambda c: maxtext_scheme(c, MaxTextLayout("scanned", axis)),
        "maxtext unscanned": lambda c: maxtext_scheme(c, MaxTextLayout("unscanned")),
    }[via](config.replace(param_scan_axis=axis))
    named = hf_names.scheme(config, hf_names.tensors(config, lambda name: fused))
    leaves = {name: array_leaf(tensor) for name, tensor in tensors.items()}
    between = Conversion(named, middle, units(config)).leaves(leaves)
    # Through arrays: nothing of the source's order can leak into the way back.
    stored = {n: array_leaf(read_whole(leaf, n)) for n, leaf in between.items()}
    back = Conversion(middle, named, units(config)).leaves(stored)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read_whole(back[name], name), tensor, name)


@pytest.mark.parametrize("layers", [48, 46])
def test_the_published_size_maps_exactly(layers):
    """Key set and shapes of the published checkpoint, and of the model's own tree."""
    full = shared.preset("qwen3-next-80b-a3b")
    config = full.replace(layers=full.layers[:layers])
    published = tensor_shapes(config.to_hf(hub_style=True))
    for layout in ({}, {"param_scan_axis": 1}, {"scan_layers": False}):
        new = config.replace(**layout)
        named = hf_names.scheme(new, hf_names.tensors(new, lambda name: False))
        assert named.shapes == published
        own = zoo_scheme(new)
        assert own.shapes == {
            "/".join(path): leaf.shape
            for path, leaf in flatten(shared.abstract_params(new))
        }
        assert own.spots.keys() == named.spots.keys() == units(new).keys()
        conversion = Conversion(named, own, units(new))
        behind = [name for path in own.shapes for name in conversion.behind(path)]
        assert sorted(behind) == sorted(published)


# -- layouts of the zoo ---------------------------------------------------------------


@functools.cache
def values_of(config):
    return jax.jit(shared.init_params, static_argnums=1)(jax.random.key(0), config)


def numpy_tree(config):
    flat = flatten(values_of(config))
    return {"/".join(path): np.asarray(leaf) for path, leaf in flat}


def save_bare(folder, tree):
    """A tree without a manifest, as stock orbax writes it."""
    nested_tree = {}
    for path, leaf in tree.items():
        shared.plan.insert(nested_tree, tuple(path.split("/")), leaf)
    orbax.checkpoint.PyTreeCheckpointer().save(folder, nested_tree)
    return folder


EIGHT = shared.preset("qwen3-next-8l-tiny")


@pytest.mark.parametrize("layout", ["scanned", "axis 1", "unscanned"])
def test_a_layout_is_found_from_shapes(layout, tmp_path):
    config = EIGHT.replace(**LAYOUTS[layout])
    bare = save_bare(tmp_path / "bare", numpy_tree(config))
    source = open_source(bare, config=EIGHT)
    zoo = run(source, tmp_path / "zoo", Target("zoo", {"scan_layers": False}))
    expected = numpy_tree(EIGHT.replace(scan_layers=False, param_scan_axis=0))
    if layout == "axis 1":  # the axis stays, where nothing is stacked
        assert open_source(zoo).config.param_scan_axis == 1
    stored = tree_of(zoo)
    assert stored.keys() == expected.keys()
    for path, leaf in expected.items():
        assert stored[path].tobytes() == leaf.tobytes()


@pytest.mark.parametrize("axis", [0, 1])
def test_the_older_layout_is_upgraded(axis, tmp_path):
    """layer_0 to layer_3 with an axis for the blocks: made here by a loop."""
    single = numpy_tree(EIGHT.replace(scan_layers=False))
    old = {path: leaf for path, leaf in single.items() if "layers_" not in path}
    for path in single:
        if path.startswith("layers_0/") or path.startswith("layers_3/"):
            for i in (0, 1, 2) if path.startswith("layers_0/") else (3,):
                rest = path.partition("/")[2]
                both = [single[f"layers_{4 * b + i}/{rest}"] for b in range(2)]
                at = min(axis, both[0].ndim)
                old[f"layers/layer_{i}/{rest}"] = np.stack(both, at)
    source = open_source(save_bare(tmp_path / "old", old), config=EIGHT)
    zoo = run(source, tmp_path / "zoo", Target("zoo", {"param_scan_axis": 0}))
    stored, expected = tree_of(zoo), numpy_tree(EIGHT)
    assert stored.keys() == expected.keys()
    for path, leaf in expected.items():
        assert stored[path].tobytes() == leaf.tobytes()


def test_the_older_layout_has_no_place_for_a_remainder():
    with pytest.raises(CheckpointError, match="whole periods only"):
        flat_scheme(shared.preset("qwen3-next-tiny"))


def test_a_tree_that_fits_no_layout_says_what_is_nearest(tmp_path):
    tree = numpy_tree(EIGHT)
    tree["layers/global_layer/mlp/gate"] = tree["layers/global_layer/mlp/gate"][:1]
    del tree["norm"]
    with pytest.raises(CheckpointError) as error:
        detect({path: leaf.shape for path, leaf in tree.items()}, EIGHT)
    message = str(error.value)
    assert "missing: norm (32,)" in message
    assert "wrong shape: layers/global_layer/mlp/gate must be (2, 32, 8)" in message
    assert "Got (1, 32, 8)" in message


def test_what_is_given_may_not_contradict_what_is_there(tmp_path):
    zoo = run(GOLDENS / "qwen3_next_6l", tmp_path / "zoo", Target("zoo"))
    with pytest.raises(CheckpointError, match="scan_layers=False is given.*True"):
        open_source(zoo, scan_layers=False)
    with pytest.raises(CheckpointError) as error:
        open_source(zoo, config=EIGHT)
    assert "num_hidden_layers=8 is given, and the manifest says 6" in str(error.value)
    shapes = {path: leaf.shape for path, leaf in numpy_tree(EIGHT).items()}
    with pytest.raises(CheckpointError, match="param_scan_axis=1 is asked for.*axis=0"):
        detect(shapes, EIGHT, param_scan_axis=1)
    with pytest.raises(CheckpointError, match="is said to be maxtext, but it is hf"):
        open_source(GOLDENS / "qwen3_next_6l", format="maxtext")
    with pytest.raises(CheckpointError, match="does not say which model"):
        open_source(save_bare(tmp_path / "bare", numpy_tree(EIGHT)))


# -- vocabulary padding ---------------------------------------------------------------


def test_padding_is_zeros_that_no_token_and_no_logit_sees(tmp_path):
    golden = GOLDENS / "qwen3_next_6l"
    run(golden, tmp_path / "zoo", Target("zoo", {"vocab_padding": 32}))
    config, params = shared.checkpoint.load(tmp_path / "zoo")
    plain, unpadded = load_hf(golden)
    assert config == plain.replace(vocab_padding=32)
    assert params["embed_tokens"].shape == (128, plain.hidden_size)
    assert not np.asarray(params["embed_tokens"])[96:].any()
    assert not np.asarray(params["lm_head"])[:, 96:].any()
    tokens = np.arange(8, dtype=np.int32)[None]
    logits = [
        jax.jit(zoo_linen.Decoder(c).apply)({"params": p}, tokens).logits
        for c, p in ((config, params), (plain, unpadded))
    ]
    assert logits[0].shape == (1, 8, 96)
    np.testing.assert_array_equal(*logits)
    beyond = zoo_nnx.from_params(config, params)(np.full((1, 2), 100, np.int32))
    assert np.isnan(beyond.logits).all()


def test_trained_padding_is_dropped_and_nothing_else(tmp_path):
    config = EIGHT.replace(vocab_padding=4)
    tree = numpy_tree(EIGHT)
    noise = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    tree["embed_tokens"] = np.concatenate([tree["embed_tokens"], noise])
    tree["lm_head"] = np.concatenate([tree["lm_head"], noise.T], axis=1)
    source = open_source(
        save_bare(tmp_path / "bare", tree), config=EIGHT, vocab_padding=4
    )
    assert source.config == config
    stored = read(run(source, tmp_path / "hf", Target("hf")))
    plain = numpy_tree(EIGHT)
    np.testing.assert_array_equal(
        stored["model.embed_tokens.weight"], plain["embed_tokens"]
    )
    np.testing.assert_array_equal(stored["lm_head.weight"], plain["lm_head"].T)


@pytest.mark.parametrize("tied", [False, True])
def test_first_values_do_not_depend_on_padding(tied):
    config = shared.preset("qwen3-next-tiny").replace(tie_word_embeddings=tied)
    plain, padded = (
        shared.init_params(jax.random.key(0), config.replace(vocab_padding=n))
        for n in (0, 7)
    )
    table = np.asarray(padded["embed_tokens"])
    np.testing.assert_array_equal(table[:96], plain["embed_tokens"])
    assert table.shape == (103, 32) and not table[96:].any()
    if not tied:
        head = np.asarray(padded["lm_head"])
        np.testing.assert_array_equal(head[:, :96], plain["lm_head"])
        assert head.shape == (32, 103) and not head[:, 96:].any()


# -- what a Hugging Face folder has besides -------------------------------------------


def three(tmp_path, **changes):
    """A small checkpoint, its config and its tensors."""
    given = ALL_THREES | changes
    return given, unique_tensors(tensor_shapes(given))


def test_tensors_that_are_no_part_of_the_decoder_come_along_when_asked(tmp_path):
    given, tensors = three(tmp_path)
    extra = {
        "mtp.fc.weight": np.arange(6, dtype=np.int8).reshape(2, 3),
        "mtp.layers.0.norm.weight": np.float32([1, np.nan, -0.0]),
        "model.visual.patch.bias": np.ones(3, np.uint8),
        "model.visual.empty": np.zeros((0, 4), np.float16),
    }
    folder = write(tmp_path / "hf", given, {**tensors, **extra})
    zoo = run(folder, tmp_path / "zoo", Target("zoo", carry=True))
    assert_same_files(run(zoo, tmp_path / "again", Target("hf", carry=True)), folder)
    plan = plan_conversion(open_source(folder), Target("zoo"))
    assert plan.notes == (
        "left out: 4 tensors of 21 bytes that are no part of the decoder "
        "(--carry keeps them)",
    )
    assert shared.checkpoint.load(zoo)[0] == DecoderConfig.from_hf(given)


def test_tokenizer_files_come_along(tmp_path):
    golden = copy_golden("qwen3_next_6l", tmp_path / "hf")
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "LICENSE"):
        (golden / name).write_text(name)
    (golden / "notes.txt").write_text("mine")
    zoo = run(golden, tmp_path / "zoo", Target("zoo"))
    again = run(zoo, tmp_path / "again", Target("hf"))
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "LICENSE"):
        assert (again / name).read_text() == name
    assert not (again / "notes.txt").exists()


def test_a_tied_head_comes_back_as_it_was(tmp_path):
    given, tensors = three(tmp_path, tie_word_embeddings=True)
    without = write(tmp_path / "without", given, tensors)
    zoo = run(without, tmp_path / "zoo", Target("zoo"))
    assert_same_files(run(zoo, tmp_path / "one", Target("hf")), without)
    copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    folder = write(tmp_path / "with", given, copied)
    zoo = run(folder, tmp_path / "zoo2", Target("zoo"))
    assert "lm_head" not in tree_of(zoo)
    assert_same_files(run(zoo, tmp_path / "two", Target("hf")), folder)


def test_a_tied_head_that_has_gone_its_own_way_is_an_error(tmp_path):
    given, tensors = three(tmp_path, tie_word_embeddings=True)
    head = tensors["model.embed_tokens.weight"].copy()
    head[2, 1] += 1
    folder = write(tmp_path / "hf", given, {**tensors, "lm_head.weight": head})
    with pytest.raises(CheckpointError, match="lm_head.weight differs.*row 2.*set it"):
        open_source(folder)


@pytest.mark.parametrize("hub_style", [False, True])
def test_the_spelling_of_config_json(hub_style, tmp_path):
    golden = GOLDENS / "qwen3_next_6l"
    target = Target("hf", hub_style=hub_style)
    new = json.loads((run(golden, tmp_path / "hf", target) / "config.json").read_text())
    assert ("full_attention_interval" in new) == hub_style
    assert ("rope_parameters" in new) != hub_style
    assert DecoderConfig.from_hf(new) == DecoderConfig.from_hf(golden)


def test_a_cast_is_explicit_and_told(tmp_path):
    golden = GOLDENS / "qwen3_next_6l"
    plan = plan_conversion(open_source(golden), Target("zoo", param_dtype="bfloat16"))
    [note] = plan.notes  # 230 tensors, less two of each of the five linear layers
    assert note.startswith("cast: 220 tensors from float32 to bfloat16")
    convert(plan, tmp_path / "zoo")
    config, params = shared.checkpoint.load(tmp_path / "zoo")
    assert config.param_dtype == "bfloat16"
    full = dict(flatten(load_hf(golden)[1]))
    for path, leaf in flatten(params):
        kept = path[-1] in ("A_log", "dt_bias")
        expected = np.asarray(full[path])
        expected = expected if kept else expected.astype(ml_dtypes.bfloat16)
        assert np.asarray(leaf).tobytes() == expected.tobytes(), path
    again = read(run(tmp_path / "zoo", tmp_path / "hf", Target("hf")))
    assert {str(t.dtype) for t in again.values()} == {"bfloat16", "float32"}


def test_every_bit_pattern_and_every_dtype_comes_back(tmp_path):
    """NaN with payloads, subnormals, -0.0; A_log float32 among bfloat16."""
    given, tensors = three(tmp_path)
    bits = itertools.cycle(range(2**16))
    stored = {}
    for name, tensor in tensors.items():
        wide = "A_log" in name or "dt_bias" in name
        count = tensor.size * (2 if wide else 1)
        words = np.array([next(bits) for _ in range(count)], np.uint16)
        dtype = np.float32 if wide else ml_dtypes.bfloat16
        stored[name] = words.view(dtype).reshape(tensor.shape)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given | {"dtype": "bfloat16"}))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    for i, layout in enumerate(LAYOUTS.values()):
        layout = {} if "scan_period" in layout else layout
        zoo = run(folder, tmp_path / f"zoo{i}", Target("zoo", layout))
        assert_same_files(run(zoo, tmp_path / f"hf{i}", Target("hf")), folder)


# -- MaxText's training checkpoint ----------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_optimizer_state_is_converted_like_the_parameters(tmp_path):
    folder = MAXTEXT / "scanned_train_orbax" / "7"
    source = open_source(folder, config=config_of(6))
    assert set(source.alike) == {("opt_state", 0, "mu"), ("opt_state", 0, "nu")}
    zoo = run(source, tmp_path / "zoo", Target("zoo"))
    old = orbax.checkpoint.PyTreeCheckpointer().restore(folder / "items")
    new = orbax.checkpoint.PyTreeCheckpointer().restore(zoo)
    assert new["step"] == 7 and new["step"].dtype == np.int32
    assert new["opt_state"][1] is None
    assert new["opt_state"][0]["count"] == 7 == new["opt_state"][2]["count"]
    for tree, params in [
        (new["params"], old["params"]["params"]),
        (new["opt_state"][0]["mu"], old["opt_state"][0]["mu"]["params"]),
        (new["opt_state"][0]["nu"], old["opt_state"][0]["nu"]["params"]),
    ]:
        decoder = params["decoder"]
        np.testing.assert_array_equal(
            tree["embed_tokens"], params["token_embedder"]["embedding"], strict=True
        )
        ours = tree["layers"]["local_layers"]
        theirs = decoder["layers"]["local_layers"]
        np.testing.assert_array_equal(  # heads, block, layer
            ours["linear_attn"]["A_log"],
            np.moveaxis(theirs["attention"]["A_log"], 0, -1),
        )
        np.testing.assert_array_equal(  # expert, block, layer, in, out
            ours["mlp"]["experts"]["down_proj"],
            np.moveaxis(theirs["mlp"]["routed_experts"]["wo"], 0, 2),
        )
        query = decoder["layers"]["global_layer"]["attention"]["attention"]["query"]
        np.testing.assert_array_equal(
            tree["layers"]["global_layer"]["self_attn"]["q_proj"][0],
            query["kernel"][:, 0].reshape(32, -1),
        )
    back = run(zoo, tmp_path / "back", Target("maxtext"))
    before, after = open_store(folder), open_store(back)
    assert before.leaves.keys() == after.leaves.keys()
    assert before.empty.keys() == after.empty.keys()
    for path, leaf in before.leaves.items():
        one, two = (read_whole(x, "it") for x in (leaf, after.leaves[path]))
        assert one.tobytes() == two.tobytes() and leaf.dtype == after.leaves[path].dtype


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_training_step_goes_on_from_a_converted_checkpoint(tmp_path):
    """The optimizer's state fits optax's own, and gives a step."""
    source = open_source(MAXTEXT / "scanned_train_orbax" / "7", config=config_of(6))
    zoo = run(source, tmp_path / "zoo", Target("zoo", {"scan_layers": False}))
    tree = orbax.checkpoint.PyTreeCheckpointer().restore(zoo)
    params = tree["params"]
    adam = optax.scale_by_adam()
    moments = tree["opt_state"][0]
    state = adam.init(params)._replace(
        count=moments["count"], mu=moments["mu"], nu=moments["nu"]
    )
    assert jax.tree.structure(state) == jax.tree.structure(adam.init(params))
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        updates, _ = adam.update(jax.tree.map(np.zeros_like, params), state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))


def test_moments_stay_apart_where_no_level_is_called_params(tmp_path):
    """MaxText's parameters with moments beside them, as other tools keep them."""
    with np.load(MAXTEXT / "scanned_params.npz") as file:
        params = dict(file)
    tree = {f"params/{name}": leaf for name, leaf in params.items()}
    for i, moment in enumerate(("mu", "nu"), start=2):
        tree |= {f"opt_state/{moment}/{name}": i * x for name, x in params.items()}
    np.savez(tmp_path / "it.npz", **tree)
    source = open_source(tmp_path / "it.npz", config=config_of(6))
    run(source, tmp_path / "zoo", Target("zoo"))
    tree = orbax.checkpoint.PyTreeCheckpointer().restore(tmp_path / "zoo")
    for i, moment in enumerate(("mu", "nu"), start=2):
        np.testing.assert_array_equal(
            tree["opt_state"][moment]["embed_tokens"],
            i * tree["params"]["embed_tokens"],
        )


def test_moments_of_some_parameters_are_not_left_in_an_old_layout(tmp_path):
    """As `optax.masked` keeps them: here of all but the norms."""
    config = EIGHT
    params = numpy_tree(config)
    tree = {f"params/{path}": leaf for path, leaf in params.items()}
    tree |= {f"opt/mu/{p}": leaf for p, leaf in params.items() if "norm" not in p}
    source = open_source(save_bare(tmp_path / "bare", tree), config=config)
    for layout in ({"scan_layers": False}, {"vocab_padding": 8}):
        with pytest.raises(CheckpointError, match="(?s)only some parameters.*opt/mu/"):
            plan_conversion(source, Target("zoo", layout))
    same = run(source, tmp_path / "zoo", Target("zoo"))
    stored = orbax.checkpoint.PyTreeCheckpointer().restore(same)["opt"]["mu"]
    np.testing.assert_array_equal(stored["embed_tokens"], params["embed_tokens"])


def test_such_moments_are_refused_too_where_both_layouts_have_equal_shapes(tmp_path):
    config = DecoderConfig.from_hf(ALL_THREES)  # three blocks of three layers
    shapes = zoo_scheme(config).shapes
    other = zoo_scheme(config.replace(param_scan_axis=1)).shapes
    name = "layers/local_layers/mlp/gate"
    assert shapes[name] == other[name] == (3, 3, 3, 3)
    tree = {f"params/{path}": np.zeros(shape) for path, shape in shapes.items()}
    tree |= {f"opt/mu/{path}": np.zeros(shapes[path]) for path in (name, "norm")}
    np.savez(tmp_path / "it.npz", **tree)
    source = open_source(tmp_path / "it.npz", config=config, param_scan_axis=0)
    with pytest.raises(CheckpointError, match="only some parameters"):
        plan_conversion(source, Target("zoo", {"param_scan_axis": 1}))
    assert plan_conversion(source, Target("zoo"))


def test_the_way_through_maxtext_keeps_how_the_source_was_written(tmp_path):
    golden = copy_golden("qwen3_next_8l/fused_experts", tmp_path / "hf")
    (golden / "tokenizer.json").write_text("{}")
    between = run(golden, tmp_path / "maxtext", Target("maxtext"))
    again = run(between, tmp_path / "again", Target("hf"))
    assert_same_files(again, golden)
    assert (again / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"step": 3}, "step=3"),
        ({"param_scan_axis": 1}, "param_scan_axis=1"),
        ({"vocab_padding": 9}, "vocab_padding=9"),
        ({"config": EIGHT}, "another config cannot be given"),
    ],
)
def test_nothing_is_said_of_a_hugging_face_folder(given, message):
    with pytest.raises(CheckpointError, match=f"{message}.*cannot be given|{message}"):
        open_source(GOLDENS / "qwen3_next_6l", **given)


def test_what_is_said_of_ours_is_compared(tmp_path):
    zoo = run(GOLDENS / "qwen3_next_6l", tmp_path / "zoo", Target("zoo"))
    maxtext = run(zoo, tmp_path / "maxtext", Target("maxtext"))
    for folder, said, message in [
        (zoo, {"format": "maxtext"}, "is said to be maxtext.*manifest says zoo"),
        (zoo, {"step": 3}, "step=3 is given, but .* has no steps"),
        (zoo, {"vocab_padding": 9}, "vocab_padding=9 is given.*says 0"),
        (zoo, {"scan_period": 3}, "scan_period=3 is given"),
        (maxtext, {"format": "zoo"}, "is said to be zoo.*manifest says maxtext"),
        (maxtext, {"config": EIGHT}, "num_hidden_layers=8 is given.*says 6"),
        (maxtext, {"scan_layers": False}, "scan_layers=False is given"),
        (maxtext, {"vocab_padding": 9}, "vocab_padding=9 is given.*says 0"),
    ]:
        with pytest.raises(CheckpointError, match=f"(?s){message}"):
            open_source(folder, **said)
    assert open_source(zoo, scan_period=4, scan_layers=True).config.scan_period is None
    bare = save_bare(tmp_path / "bare", numpy_tree(EIGHT))
    assert open_source(bare, config=EIGHT, scan_period=4)
    unscanned = MAXTEXT / "unscanned_params.npz"
    with pytest.raises(CheckpointError, match="param_scan_axis=0 is given.*unscanned"):
        open_source(unscanned, config=config_of(6), param_scan_axis=0)


def test_parameters_are_floats(tmp_path):
    tree = numpy_tree(EIGHT)
    tree["norm"] = tree["norm"].astype(np.complex64)
    tree["lm_head"] = tree["lm_head"].astype(np.int32)
    np.savez(tmp_path / "it.npz", **tree)
    with pytest.raises(CheckpointError) as error:
        open_source(tmp_path / "it.npz", config=EIGHT)
    assert "norm is complex64" in str(error.value)
    assert "lm_head is int32" in str(error.value)


def test_names_that_are_carried_stay_as_they_are(tmp_path):
    given, tensors = three(tmp_path)
    extra = {"mtp.a/b.weight": np.float32([1]), "mtp.a.b.weight": np.float32([2])}
    folder = write(tmp_path / "hf", given, {**tensors, **extra})
    zoo = run(folder, tmp_path / "zoo", Target("zoo", carry=True))
    again = read(run(zoo, tmp_path / "again", Target("hf", carry=True)))
    assert again["mtp.a/b.weight"] == 1 and again["mtp.a.b.weight"] == 2
    for target in (Target("maxtext"), Target("vllm")):
        notes = plan_conversion(open_source(folder), target).notes
        assert any("2 tensors of 8 bytes" in note for note in notes)


def test_a_dtype_that_nobody_knows_matters_only_if_it_is_carried(tmp_path):
    given, tensors = three(tmp_path)
    folder = write(tmp_path / "hf", given, {**tensors, "mtp.x": np.zeros(4, np.uint8)})
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"mtp.x":{"dtype":"U8"', b'"mtp.x":{"dtype":"I8"'))
    source = dataclasses.replace(open_source(folder), lost=("mtp.y: dtype F4",))
    assert "left out: mtp.y: dtype F4" in plan_conversion(source, Target("zoo")).notes
    with pytest.raises(
        CheckpointError, match="(?s)cannot be carried:.*mtp.y: dtype F4"
    ):
        plan_conversion(source, Target("zoo", carry=True))


# -- damage ---------------------------------------------------------------------------


def digest_of(folder):
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def flip(folder):
    file = max(folder.glob("params.layers.local_layers.mlp.experts.up_proj/[0-9]*"))
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)
    return "experts/up_proj: its SHA-256 is .* and the manifest says"


def absent(folder):
    shutil.rmtree(folder / "params.norm")
    return "params.norm is in _METADATA and cannot be opened"


def absent_chunk(folder):
    next((folder / "params.norm").glob("[0-9]*")).unlink()
    return "params/norm"


def cut(folder):
    file = next((folder / "params.lm_head").glob("[0-9]*"))
    file.write_bytes(file.read_bytes()[:-1])
    return "params/lm_head"


def lie(folder):
    data = json.loads((folder / "manifest.json").read_text())
    data["leaves"]["params/norm"]["shape"] = [31]
    (folder / "manifest.json").write_text(json.dumps(data))
    return r"params/norm is float32 \(48,\), and the manifest says float32 \(31,\)"


@pytest.mark.parametrize("damage", [flip, absent, absent_chunk, cut, lie])
def test_a_damaged_checkpoint_of_ours_is_named_and_nothing_is_written(damage, tmp_path):
    zoo = run(GOLDENS / "qwen3_next_6l", tmp_path / "zoo", Target("zoo"))
    message = damage(zoo)
    before = digest_of(zoo)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        run(zoo, tmp_path / "hf", Target("hf"))
    assert [path.name for path in tmp_path.iterdir()] == ["zoo"]
    assert digest_of(zoo) == before


def test_a_shard_that_was_cut_is_named_and_nothing_is_written(tmp_path):
    golden = copy_golden("qwen3_next_8l/sharded", tmp_path / "hf")
    shard = sorted(golden.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        run(golden, tmp_path / "zoo", Target("zoo"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}, where .* is not there"):
        run(golden, tmp_path / "zoo", Target("zoo"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    for target in (Target("zoo"), Target("maxtext"), Target("vllm")):
        with pytest.raises(CheckpointError, match="It has thesis.txt. Give a new"):
            run(GOLDENS / "qwen3_next_6l", tmp_path / "mine", target)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_a_target_has_no_place_for_is_told(tmp_path):
    source = open_source(MAXTEXT / "scanned_train_orbax" / "7", config=config_of(6))
    [note] = plan_conversion(source, Target("hf")).notes
    assert note.startswith(f"left out: {2 * 53 + len(source.rest)} leaves of training")
    dense = open_source(GOLDENS / "qwen3_next_dense_mix")
    with pytest.raises(CheckpointError, match="dense"):
        plan_conversion(dense, Target("maxtext"))


def test_a_destination_is_looked_at_before_anything_is_read(tmp_path):
    zoo = run(GOLDENS / "qwen3_next_6l", tmp_path / "zoo", Target("zoo"))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = digest_of(zoo)
    plan = plan_conversion(open_source(zoo), Target("hf"))
    for folder, message in [
        (zoo / "inner", "is inside the source"),
        (zoo, "exists. It has"),
        (tmp_path / "link", "is a link"),
        (zoo / "manifest.json" / "new", "is no folder that can be written"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            convert(plan, folder)
    assert digest_of(zoo) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real", "zoo"]


def test_a_manifest_of_somebody_else_is_none_of_ours(tmp_path):
    golden = copy_golden("qwen3_next_6l", tmp_path / "hf")
    (golden / "manifest.json").write_text('{"name": "an app"}')
    assert open_source(golden).format == "hf"


def test_a_manifest_with_a_layout_that_nobody_has(tmp_path):
    zoo = run(GOLDENS / "qwen3_next_6l", tmp_path / "zoo", Target("zoo"))
    file = zoo / "manifest.json"
    data = json.loads(file.read_text())
    data["layout"]["stacked_twice"] = True
    file.write_text(json.dumps(data))
    with pytest.raises(
        CheckpointError, match="a config or a layout that make no model"
    ):
        open_source(zoo)


def test_what_a_killed_run_has_left_is_thrown_away(tmp_path):
    stale = tmp_path / ".hf.partial"
    (stale / "old").mkdir(parents=True)
    (stale / "model.safetensors").write_text("half")
    golden = GOLDENS / "qwen3_next_6l"
    assert_same_files(run(golden, tmp_path / "hf", Target("hf")), golden)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_two_runs_do_not_write_one_folder(tmp_path):
    with new_folder(tmp_path / "new"):
        for target in (Target("hf"), Target("zoo")):
            with pytest.raises(CheckpointError, match="Another process is writing"):
                run(GOLDENS / "qwen3_next_6l", tmp_path / "new", target)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_killed_run_with_other_options_is_not_mixed_up(tmp_path, monkeypatch):
    """What it has finished stays; the same run again finishes it."""
    golden = GOLDENS / "qwen3_next_6l"
    written = []

    def interrupted(folder, path, *rest):
        if len(written) == 20:
            raise KeyboardInterrupt
        written.append(path)
        return write_array(folder, path, *rest)

    monkeypatch.setattr(native, "write_array", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(golden, tmp_path / "zoo", Target("zoo"))
    assert not (tmp_path / "zoo").exists()
    with pytest.raises(CheckpointError, match="was not finished"):
        open_store(tmp_path / ".zoo.partial")
    with pytest.raises(CheckpointError, match="left by a run with another source or"):
        run(golden, tmp_path / "zoo", Target("zoo", {"param_scan_axis": 1}))
    first = list(written)
    written.clear()
    written.extend([None] * 21)  # never 20 again
    run(golden, tmp_path / "zoo", Target("zoo"))
    again = [path for path in written if path is not None]
    assert len(first) == 20 and len(again) == 33 and not set(first) & set(again)
    monkeypatch.undo()
    whole = run(golden, tmp_path / "whole", Target("zoo"))
    assert digest_of(tmp_path / "zoo") == digest_of(whole)
