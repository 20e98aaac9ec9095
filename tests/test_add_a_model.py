"""docs/add-a-model.md: what it quotes is what stands there, what it counts is counted.

A family of models is two files and the lines that register them. That is measured here
over all packages: names and strings of the code, without comments and docstrings.
"""

import ast
import dataclasses
import functools
import io
import pathlib
import re
import shlex
import tokenize

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import shared
import zoo_linen
import zoo_linen.decoder_layer
import zoo_nnx
import zoo_nnx.decoder_layer
from parity.__main__ import main
from shared.checkpoint import hf_families
from shared.layers import decoder_layer
from shared.trees import flatten, path_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "docs" / "add-a-model.md").read_text()
PACKAGES = ("shared", "zoo_linen", "zoo_nnx", "parity")

# The page: excerpts and commands.


def excerpts():
    """Blocks with the file that the text names last before each.

    Those that are no whole statements are `text`, since formatters rewrite the others.
    """
    found = []
    for match in re.finditer(r"```(?:python|text)\n(.*?)```", GUIDE, re.DOTALL):
        named = re.findall(r"`([\w/]+\.py)`", GUIDE[: match.start()])
        found.append((named[-1], match[1]))
    return found


def commands():
    prose = re.sub(r"```.*?```", "", GUIDE, flags=re.DOTALL)
    lines = (line for line in prose.splitlines() if line.startswith("    "))
    return [shlex.split(line) for line in lines]


def test_every_excerpt_stands_verbatim_in_its_file():
    assert len(excerpts()) == 12
    for name, text in excerpts():
        assert text in (ROOT / name).read_text(), f"{name} has no\n{text}"


def test_every_file_that_is_named_is_there():
    names = set(re.findall(r"`([\w/.*-]+/[\w.*-]*)`", GUIDE))
    assert "shared/presets/gemma3.py" in names
    for name in names - {"presets/family.py", "hf_families/family.py"}:
        short = name.startswith(("presets/", "hf_families/"))
        pattern = f"shared/**/{name}" if short else name.rstrip("/")
        assert list(ROOT.glob(pattern)), name


def test_the_commands_are_of_the_project_and_the_cheap_ones_succeed():
    by_program = {}
    for program, *arguments in commands():
        by_program.setdefault(program, []).append(arguments)
    assert by_program.keys() == {"parity", "pytest", ".ci/run"}
    for arguments in by_program["pytest"]:
        for name in (a for a in arguments if "/" in a):
            assert (ROOT / name).exists(), name
    cheap = [["models"], ["check", "gemma-3-tiny", "--tiers=tree"]]
    assert all(arguments in by_program["parity"] for arguments in cheap)
    for arguments in cheap:
        assert main(arguments) == 0


# How many lines of code know a family.

FAMILIES = {
    "qwen3_next": r"qwen3?[-_ ]?next",
    "qwen3_5": r"qwen[-_ ]?3[._]5",
    "gemma3": r"gemma[-_ ]?3",
    "gemma4": r"gemma[-_ ]?4",
    "deepseek_v3": r"deepseek",
}
TITLES = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5": "Qwen3.5",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "deepseek_v3": "DeepSeek-V3",
}
# These take tables of another family: they are that one's readers, not its registry.
BUILT_ON = {"qwen3_next": ("qwen3_5",), "gemma3": ("gemma4",)}
HF, PRESETS = "shared/checkpoint/hf_families", "shared/presets"
# What else may know the first family, and why. No other family has an entry.
EXCEPTIONS = {
    "qwen3_next": {
        "shared/checkpoint/maxtext.py": "a format: MaxText's tree of this model",
        "shared/checkpoint/vllm.py": "a format: vLLM's weights of this model",
        "parity/strategies.py": "the family that drawn configs are said to be of",
    }
}


def sources(*packages):
    for package in packages or PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


@functools.cache
def code_lines(name):
    """Names and strings of a file by line, without comments and docstrings."""
    text = (ROOT / name).read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, False) is not None
    }
    kinds = {tokenize.NAME, tokenize.STRING}
    kinds |= {getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # from 3.12 on
    lines = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds and token.start not in docstrings:
            lines.setdefault(token.start[0], []).append(token.string)
    return {number: " ".join(words) for number, words in lines.items()}


def files_of(family):
    return {f"{folder}/{family}.py" for folder in (HF, PRESETS)}


def lines_that_know(family):
    """Number of lines by file, without the family's own files and their readers."""
    own = set().union(*map(files_of, (family, *BUILT_ON.get(family, ()))))
    pattern = re.compile(FAMILIES[family], re.IGNORECASE)
    counts = {
        name: sum(bool(pattern.search(line)) for line in code_lines(name).values())
        for name, _ in sources()
        if name not in own
    }
    return {name: count for name, count in counts.items() if count}


def test_the_measure_sees_names_and_strings_but_no_prose():
    lines = code_lines("shared/presets/__init__.py")
    assert any("qwen3_next_tiny" in text for text in lines.values())
    prose = "shared/layers/gated_delta_net.py"
    assert "Qwen3-Next" in (ROOT / prose).read_text()
    assert not any("Qwen" in text for text in code_lines(prose).values())
    assert lines_that_know("qwen3_next").keys() >= EXCEPTIONS["qwen3_next"].keys()


def test_every_family_has_its_two_files_and_they_are_all():
    for folder, others in (
        (HF, {"__init__", "fields", "rope", "rows", "source"}),
        (PRESETS, {"__init__", "entry"}),
    ):
        stems = {path.stem for path in (ROOT / folder).glob("*.py")}
        assert stems == {*FAMILIES, *others}


@pytest.mark.parametrize("family", FAMILIES)
def test_outside_of_its_two_files_only_the_registry_knows_a_family(family):
    counts = lines_that_know(family)
    for name in EXCEPTIONS.get(family, ()):
        del counts[name]
    assert set(counts) == {f"{HF}/__init__.py", f"{PRESETS}/__init__.py"}
    pattern = re.compile(FAMILIES[family])
    model_types = sum(bool(pattern.match(name)) for name in hf_families.FAMILIES)
    wrappers = sum(bool(pattern.match(name)) for name in hf_families.WRAPPERS)
    assert counts[f"{HF}/__init__.py"] == 1 + model_types + wrappers  # 1: the import
    if family != "qwen3_next":  # whose makers of configs the package exports
        assert counts[f"{PRESETS}/__init__.py"] == 2


def test_the_guide_says_the_numbers_that_are_measured():
    said = re.findall(r"^\| ([\w. -]+?) \| (\d+) \| (\d+) \| (\d+) \|$", GUIDE, re.M)
    measured = []
    for family, title in TITLES.items():
        counts = lines_that_know(family)
        registry = [counts.pop(f"{folder}/__init__.py") for folder in (HF, PRESETS)]
        row = (*registry, sum(counts.values()))
        measured.append((title, *map(str, row)))
    assert said == measured


# Nothing asks for the family but those who read and write files.

COMPARERS = {
    "shared/checkpoint/hf_names.py": "refuses a family that has no table",
    "shared/checkpoint/maxtext.py": "a format of one family",
    "shared/checkpoint/vllm.py": "a format of one family",
}
READERS = {
    **COMPARERS,
    "shared/checkpoint/hf_config.py": "reads and writes config.json by the table",
    "parity/cli/models.py": "prints it",
}


def is_family(node):
    """Whether this is `config.family`, and not the function `hf_names.family`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "family"
        and not (isinstance(node.value, ast.Name) and node.value.id == "hf_names")
    )


def asks(node):
    """Whether something is decided by the family."""
    if isinstance(node, ast.Compare):
        return any(map(is_family, ast.walk(node)))
    if isinstance(node, ast.Match):
        return any(map(is_family, ast.walk(node.subject)))
    if isinstance(node, ast.Call):  # config.family.startswith(…)
        return isinstance(node.func, ast.Attribute) and is_family(node.func.value)
    return False


def test_only_files_of_formats_look_at_the_family():
    readers, comparers = set(), set()
    for name, text in sources():
        nodes = list(ast.walk(ast.parse(text)))
        if any(map(is_family, nodes)):
            readers.add(name)
        if any(map(asks, nodes)):
            comparers.add(name)
    assert readers == set(READERS)
    assert comparers == set(COMPARERS)


# Qwen3.5 is Qwen3-Next with other projections.


def alike(scan_layers):
    """Both at the same sizes: those of presets, made equal where they differ."""
    five = shared.preset("qwen3.5-moe-tiny").replace(scan_layers=scan_layers)
    other = shared.preset("qwen3-next-tiny").replace(
        scan_layers=scan_layers, moe=five.moe, mlp=five.mlp
    )
    rope = dataclasses.replace(other.attention.rope, rotary_dim=8)
    attention = dataclasses.replace(other.attention, rope=rope)
    return other.replace(attention=attention), five


def fields(value, path=""):
    """Every field of a config by path."""
    if not dataclasses.is_dataclass(value):
        return {path: value}
    found = {}
    for one in dataclasses.fields(value):
        below = f"{path}.{one.name}" if path else one.name
        found |= fields(getattr(value, one.name), below)
    return found


def test_the_configs_differ_in_projections_and_in_axes_of_positions():
    other, five = map(fields, alike(True))
    assert {path for path in five if five[path] != other[path]} == {
        "family",
        "delta_net.grouped_projections",
        "attention.rope.sections",
    }


@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_trees_differ_in_projections_of_the_delta_net_only(scan_layers):
    trees = [
        {path_text(path): leaf for path, leaf in flatten(shared.abstract_params(c))}
        for c in alike(scan_layers)
    ]
    other, five = trees
    grouped, flat = other.keys() - five.keys(), five.keys() - other.keys()
    assert {p.rpartition("/")[2] for p in grouped} == {"in_proj_qkvz", "in_proj_ba"}
    assert {p.rpartition("/")[2] for p in flat} == {
        f"in_proj_{name}" for name in ("qkv", "z", "b", "a")
    }
    assert all("/linear_attn/" in path for path in grouped | flat)
    assert all(other[path] == five[path] for path in other.keys() & five.keys())
    sizes = [sum(leaf.size for leaf in tree.values()) for tree in trees]
    assert sizes[0] == sizes[1]


def linen_classes(config):
    seen = {}

    def note(call, args, kwargs, context):
        seen["/".join(context.module.path)] = type(context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(
            zoo_linen.Decoder(config).apply,
            {"params": shared.abstract_params(config)},
            jax.ShapeDtypeStruct((1, 3), jnp.int32),
        )
    return seen


def nnx_classes(config):
    model = nnx.eval_shape(lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0)))
    return {path_text(path): type(node) for path, node in nnx.iter_modules(model)}


@pytest.mark.parametrize("classes", [linen_classes, nnx_classes])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_modules_are_the_same_classes_at_the_same_places(classes, scan_layers):
    other, five = map(classes, alike(scan_layers))
    assert len(five) > 10
    assert other == five


def test_each_frontend_has_one_decoder_one_layer_and_one_table_of_modules():
    for zoo in (zoo_linen, zoo_nnx):
        trees = [ast.parse(text) for _, text in sources(zoo.__name__)]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
        decoders = [n for n in names if n.endswith(("Decoder", "DecoderLayer"))]
        assert sorted(decoders) == ["Decoder", "DecoderLayer"]
        tables = [n for n in nodes if isinstance(n, ast.AnnAssign | ast.Assign)]
        assert sum("MODULES" in ast.unparse(n).partition("=")[0] for n in tables) == 1
    tables = [zoo.decoder_layer.MODULES for zoo in (zoo_linen, zoo_nnx)]
    parts = [list(table) for table in tables]
    assert parts[0] == parts[1]
    used = {
        type(part)
        for name in shared.presets()
        for config in (shared.preset(name),)
        for kind in set(config.layers)
        for part in decoder_layer.modules(config, kind).values()
    }
    assert used == set(parts[0])


def flat_order(config, weights):
    """Qwen3-Next's grouped projections as Qwen3.5 has them, by hand."""
    part = config.delta_net
    keys, values = part.key_head_dim, part.values_per_key * part.value_head_dim
    ends = np.cumsum([keys, keys, values, values])
    weights = dict(weights)
    by_head = np.asarray(weights.pop("in_proj_qkvz"))
    by_head = by_head.reshape(config.hidden_size, part.num_key_heads, ends[-1])
    q, k, v, z = (
        group.reshape(config.hidden_size, -1)
        for group in np.split(by_head, ends[:-1], axis=-1)
    )
    gates = np.asarray(weights.pop("in_proj_ba"))
    gates = gates.reshape(config.hidden_size, part.num_key_heads, 2, -1)
    b, a = (gates[:, :, i].reshape(config.hidden_size, -1) for i in (0, 1))
    weights["in_proj_qkv"] = np.concatenate([q, k, v], axis=-1)
    return weights | {"in_proj_z": z, "in_proj_b": b, "in_proj_a": a}


def test_with_the_columns_in_the_other_order_both_give_the_same_logits():
    configs = [c.replace(layers=c.layers[2:4]) for c in alike(False)]  # linear, full
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: random.normal(0, 0.2, leaf.shape).astype(leaf.dtype),
        shared.abstract_params(configs[0]),
    )
    layer = dict(params["layers_0"])
    layer["linear_attn"] = flat_order(configs[0], layer["linear_attn"])
    tokens = random.integers(0, 96, (2, 9), dtype=np.int32)
    with jax.default_matmul_precision("highest"):
        other, five = (
            jax.jit(zoo_linen.Decoder(config).apply)({"params": tree}, tokens).logits
            for config, tree in zip(
                configs, (params, {**params, "layers_0": layer}), strict=True
            )
        )
    np.testing.assert_allclose(five, other, rtol=0, atol=1e-4)
    assert np.std(other) > 0.1
