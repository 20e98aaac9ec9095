"""`parity shardings`: where parameters stand, and what is said of bad input."""

import io
import json

import pytest
import rich.console

import parity.__main__
import shared
from shared.trees import flatten, path_text


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    status = parity.__main__.main(["shardings", *map(str, argv)], console)
    return status, out.getvalue()


def test_every_parameter_is_listed_with_what_a_device_holds(tmp_path):
    file = tmp_path / "list.json"
    mesh = "--mesh=tensor=2,fsdp=8"
    status, text = main("qwen3-next-tiny", mesh, f"--json={file}")
    assert status == 0
    result = json.loads(file.read_text())
    assert list(result["mesh"].items()) == [("fsdp", 8), ("tensor", 2)]
    rows = {row["parameter"]: row for row in result["leaves"]}
    params = dict(flatten(shared.abstract_params(shared.preset("qwen3-next-tiny"))))
    assert rows.keys() == {path_text(path) for path in params}
    for path, leaf in params.items():
        row, parts = rows[path_text(path)], 1
        for axes in row["mesh_axes"]:
            for axis in axes:
                parts *= result["mesh"][axis]
        assert row["bytes"] * parts == row["whole_bytes"] == leaf.size * 4, path
        assert row["parameter"] in text
    experts = rows["layers/local_layers/mlp/experts/down_proj"]
    assert experts["mesh_axes"] == [[], [], [], ["tensor"], ["fsdp"]]
    held = sum(row["bytes"] for row in rows.values())
    assert f"on 16 devices: {held / 1e9:,.3f} GB a device" in text


def test_a_cache_is_listed_as_decoding_spreads_it(tmp_path):
    file = tmp_path / "list.json"
    mesh = "--mesh=data=2,tensor=2,context=2"
    status, text = main("qwen3-next-tiny", mesh, "--cache=4,16", f"--json={file}")
    assert status == 0
    rows = {row["cache"]: row for row in json.loads(file.read_text())["cache"]}
    keys = rows["layers/global_layer/keys"]
    assert keys["axes"] == ["blocks", "batch", "positions", "heads", None]
    assert keys["shape"] == [1, 4, 16, 2, 16]
    assert keys["mesh_axes"] == [[], ["data", "context"], [], ["tensor"], []]
    assert keys["bytes"] == 4 * 4 * 16 * 2 * 16 // 8
    state = rows["layers_remainder/local_layers/state"]
    assert state["mesh_axes"] == [[], ["data", "context"], ["tensor"], [], []]
    held = sum(row["bytes"] for row in rows.values())
    assert f"{len(rows)} leaves on 8 devices: {held / 1e9:,.3f} GB a device" in text


def test_the_published_model_trained_with_adamw_has_the_peers_arguments():
    """7,487,574,016 bytes of parameters and two moments on each of 128 devices."""
    _, text = main("qwen3-next-80b-a3b", "--mesh=fsdp=128")
    held = float(text.rpartition("devices: ")[2].split(" GB")[0])
    assert abs(3 * held / 7.487574016 - 1) < 0.01


def test_rules_may_come_from_a_file(tmp_path):
    rules = tmp_path / "rules.json"
    names = ("heads", "mlp", "expert", "blocks", "layers")
    nothing = [[name, None] for name in names]
    rules.write_text(json.dumps([["vocab", ["fsdp"]], ["embed", "fsdp"], *nothing]))
    status, text = main("qwen3-next-tiny", "--mesh=fsdp=8", f"--rules={rules}")
    assert status == 0
    (head,) = (line for line in text.splitlines() if "lm_head" in line)
    assert "embed 32, vocab 96 / fsdp" in head


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "takes one TARGET"),
        (["qwen3-next-tiny"], "--mesh is missing"),
        (["qwen3-next-tiny", "--mesh=rows=2"], "'rows=2'"),
        (["qwen3-next-tiny", "--mesh=fsdp=two"], "'fsdp=two'"),
        (["qwen3-next-tiny", "--mesh=fsdp=2,fsdp=4"], "once and a size"),
        (["qwen3-next-tiny", "--mesh=fsdp=0"], "the size 0"),
        (["qwen3-next-tiny", "--mesh=fsdp=2", "--cache=4"], "--cache has '4'"),
        (["qwen3-next-tiny", "--mesh=fsdp=2", "--cache=4,0"], "--cache has '4,0'"),
        (
            ["qwen3-next-tiny", "--mesh=fsdp=5"],
            "embed_tokens: embed of 32 over fsdp of 5",
        ),
        (["no-such-model", "--mesh=fsdp=2"], "no-such-model"),
    ],
)
def test_bad_input_is_told(argv, words):
    status, text = main(*argv)
    assert status == 2 and words in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "is no JSON"),
        ('[["embed"]]', 'has ["embed"]'),
        ('[["embed", 3]]', 'has ["embed", 3]'),
        ('{"embed": "fsdp"}', 'has {"embed": "fsdp"}'),
        ('[["embed", "fsdp"]]', "No rule says where the axis"),
    ],
)
def test_a_file_that_holds_no_rules_is_told(tmp_path, content, words):
    rules = tmp_path / "rules.json"
    rules.write_text(content)
    status, text = main("qwen3-next-tiny", "--mesh=fsdp=8", f"--rules={rules}")
    assert status == 2 and words in text
