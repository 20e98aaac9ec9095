"""The command line: what it proves, and what it says of bad input.

Bad input gives exit status 2 and a message with the thing, both values and the way out;
`main` would let an exception of ours through, and with it the traceback.
"""

import io
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import rich.console
from safetensors.numpy import load_file, save_file

import parity.__main__
import shared
from parity.__main__ import COMMANDS

ROOT = pathlib.Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
TINY = pathlib.Path(shared.__file__).parent / "data" / "qwen3_next_tiny"


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    return parity.__main__.main([str(arg) for arg in argv], console), out.getvalue()


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that a test may break."""
    return pathlib.Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path):
    source = GOLDENS / "qwen3_next_8l" / "sharded"
    return pathlib.Path(shutil.copytree(source, tmp_path / "sharded"))


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def configure(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(*argv):
    """What `parity` says when it refuses."""
    status, out = main(*argv)
    assert status == 2, out
    assert "Traceback" not in out
    assert len(out.strip()) > 20
    return out


def refused_check(folder):
    return refused("check", folder, "--tiers=bits")


# Good input.


def test_models_lists_every_preset_with_its_size(tmp_path):
    file = tmp_path / "models.json"
    status, out = main("models", f"--json={file}")
    assert status == 0
    rows = {row["preset"]: row for row in json.loads(file.read_text())}
    assert set(rows) == set(shared.presets())
    assert all(name in out for name in rows)
    assert rows["qwen3-next-80b-a3b"]["layers"] == 48
    assert f"{rows['qwen3-next-80b-a3b']['parameters']:,}" in out
    doubted = {name for name, row in rows.items() if row["not_verified"]}
    assert doubted == {"gemma-4-26b-a4b", "gemma-4-31b"}
    for name in rows:
        assert (f"{name}*" in out) == (name in doubted)
    assert "* gemma-4-31b: not verified: max_position_embeddings" in out


def test_check_writes_json_and_markdown(tmp_path):
    files = [tmp_path / name for name in ("report.json", "report.md")]
    status, out = main(
        "check",
        "qwen3-next-tiny",
        "--tiers=tree",
        f"--json={files[0]}",
        f"--markdown={files[1]}",
    )
    assert status == 0
    assert "proved" in out
    report = json.loads(files[0].read_text())
    assert report["ok"] is True
    assert report["target"] == "qwen3-next-tiny"
    assert {"jax", "flax", "backend"} <= set(report["environment"])
    (tier,) = report["tiers"]
    assert (tier["tier"], tier["status"], tier["differences"]) == ("tree", "proved", [])
    assert tier["leaves"] > 20
    assert tier["elements"] > 1e4
    assert "| tree | proved |" in files[1].read_text()


def test_a_person_who_waits_sees_a_line_for_each_tier(monkeypatch, caplog):
    command = ["check", "qwen3-next-tiny", "--tiers=tree,init"]
    assert main(*command)[0] == 0
    assert not caplog.messages  # nobody looks
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(*command)[0] == 0
    assert [text.split(":")[0] for text in caplog.messages] == [
        "tier tree",
        "tier init",
    ]


@pytest.fixture(scope="session")
def plain_rows():
    """Of the tiny checkpoint's golden only the logits, which compile fast."""
    with np.load(TINY / "golden.npz") as arrays:
        return {key: arrays[key] for key in arrays if key.startswith("fwd/")}


def check_oracle(golden, file):
    np.savez(file, **golden)
    return main("check", TINY, "--tiers=oracle", f"--expect={file}")


def test_check_of_a_folder_against_the_reference(plain_rows, tmp_path):
    status, out = check_oracle(plain_rows, tmp_path / "golden.npz")
    assert status == 0, out
    assert "proved" in out


def test_a_golden_of_other_numbers_is_not_equal(plain_rows, tmp_path):
    wrong = dict(plain_rows)
    wrong["fwd/65/logits"] = wrong["fwd/65/logits"] + np.float32(0.5)
    status, out = check_oracle(wrong, tmp_path / "golden.npz")
    assert status == 1
    assert "fwd/65/logits: value: off by 0.5" in out
    assert "NOT EQUAL" in out


def test_the_published_size_is_compared_leaf_by_leaf_without_weights(tmp_path):
    """Under 60 s on two idle cores; the limit here is for a busy machine."""
    file = tmp_path / "report.json"
    command = "check qwen3-next-80b-a3b --tiers=tree".split()
    code = (
        "import resource, sys\n"
        "from parity.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command, f"--json={file}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "proved" in done.stdout
    (tier,) = json.loads(file.read_text())["tiers"]
    specs = shared.abstract_params(shared.preset("qwen3-next-80b-a3b"))
    assert tier["leaves"] == len(list(shared.trees.flatten(specs)))
    assert 79e9 < tier["elements"] < 81e9
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout.split()[-1]) * unit < 4 * 2**30


def test_the_published_size_is_one_program_for_a_tpu(tmp_path):
    file = tmp_path / "report.json"
    command = "check qwen3-next-80b-a3b --tiers=program --platforms=tpu".split()
    status, _ = main(*command, f"--json={file}")
    assert status == 0
    (tier,) = json.loads(file.read_text())["tiers"]
    assert tier["leaves"] == 4  # forward, loss with gradients, prefill, decode
    assert tier["elements"] > 1000


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    for flag in ("--help", "-h"):
        status, out = main(command, flag)
        assert status == 0
        assert f"parity {command}" in out
        assert "Flags:" in out


def test_help_of_the_program():
    for argument in ("--help", "-h", "help"):
        status, out = main(argument)
        assert status == 0
        assert all(command in out for command in COMMANDS)


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "parity", "check", "nonsense"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


# Bad commands.


def test_no_command_and_unknown_commands():
    assert main()[0] == 2
    out = refused("chekc", "qwen3-next-tiny")
    assert "chekc" in out
    assert "check" in re.sub("chekc", "", out)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["check"], ["target", "Got 0"]),
        (["check", "a", "b"], ["target", "Got 2"]),
        (["check", "qwen3-next-huge"], ["qwen3-next-huge", "qwen3-next-tiny"]),
        (["check", "qwen3-next-tiny", "--tiers=tree,bit"], ["bit", "oracle"]),
        (["check", "qwen3-next-tiny", "--tiers="], ["tiers", "tree"]),
        (["check", "qwen3-next-tiny", "--tiers=oracle"], ["--expect", "golden"]),
        (["check", "qwen3-next-tiny", "--tires=tree"], ["tires"]),
        (["check", "qwen3-next-tiny", "--examples=0"], ["examples", "0"]),
        (["check", "qwen3-next-tiny", "--examples=x"], ["examples", "x"]),
        (["check", "qwen3-next-80b-a3b"], ["GiB", "--tiers=tree"]),
        (["models", "all"], ["all"]),
        (["golden", "here"], ["folder", "file"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in COMMANDS else "",
)
def test_bad_arguments(argv, words):
    out = refused(*argv)
    for word in words:
        assert word in out, out


# Bad checkpoints.


def test_empty_folder(tmp_path):
    out = refused_check(tmp_path)
    assert str(tmp_path) in out
    assert "config.json" in out


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    out = refused_check(folder)
    assert "safetensors" in out
    assert str(folder) in out


def test_missing_shard(sharded):
    (sharded / "model-00003-of-00007.safetensors").unlink()
    assert "model-00003-of-00007.safetensors" in refused_check(sharded)


@pytest.mark.parametrize("tiers", ["tree", "init"])
def test_tiers_without_weights_open_the_checkpoint_too(tiers, folder, sharded):
    (sharded / "model-00003-of-00007.safetensors").unlink()
    out = refused("check", sharded, f"--tiers={tiers}")
    assert "model-00003-of-00007.safetensors" in out
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    out = refused("check", folder, f"--tiers={tiers}")
    assert "missing: model.norm.weight (" in out


def test_a_checkpoint_of_ours_is_compared_with_its_config_without_weights(tmp_path):
    config, params = shared.checkpoint.load_hf(TINY)
    shared.checkpoint.save(tmp_path / "zoo", config, params)
    assert main("check", tmp_path / "zoo", "--tiers=tree")[0] == 0
    file = tmp_path / "zoo" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["vocab_size"] += 8
    file.write_text(json.dumps(manifest))
    out = refused("check", tmp_path / "zoo", "--tiers=tree")
    width, rows = config.hidden_size, config.vocab_size
    assert f"embed_tokens must be ({rows + 8}, {width}). Got ({rows}, {width})" in out


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_file(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors" in refused_check(folder)


def test_missing_and_extra_tensors_are_listed_together(folder):
    gone = "model.layers.0.input_layernorm.weight"
    lost = "model.norm.weight"

    def change(tensors):
        tensors["model.layers.0.surprise"] = tensors.pop(gone)
        del tensors[lost]

    rewrite(folder, change)
    out = refused_check(folder)
    for word in (gone, lost, "model.layers.0.surprise", "missing", "unexpected"):
        assert word in out


def test_wrong_shape(folder):
    name = "model.norm.weight"
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    rewrite(folder, lambda tensors: tensors.update({name: np.ones(7, np.float32)}))
    out = refused_check(folder)
    assert name in out
    assert "(7,)" in out
    assert f"({size},)" in out


def test_unknown_config_field(folder):
    configure(folder, rope_wobble=3)
    out = refused_check(folder)
    assert "rope_wobble" in out
    assert "config.json" in out


def test_heads_that_do_not_divide(folder):
    configure(folder, linear_num_value_heads=5, linear_num_key_heads=2)
    out = refused_check(folder)
    for word in ("linear_num_value_heads", "linear_num_key_heads", "5", "2"):
        assert word in out
    assert "multiple" in out


def test_layer_types_of_another_length(folder):
    configure(folder, layer_types=["full_attention"])
    out = refused_check(folder)
    assert "layer_types has 1" in out
    assert "num_hidden_layers" in out


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": 3}'])
def test_config_that_is_no_config(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json" in refused_check(folder)


@pytest.mark.parametrize("target", ["qwen3-next-tiny", TINY], ids=["preset", "folder"])
def test_an_explicit_period_that_contradicts_the_layers(target):
    out = refused("check", target, "--tiers=tree", "--scan_period=3")
    for word in ("scan_period=3", "layer 3", "full_attention", "linear_attention"):
        assert word in out
    assert "Give another period" in out


# Bad goldens.


def test_golden_that_is_not_there_or_is_none(folder, tmp_path):
    missing = tmp_path / "none.npz"
    out = refused("check", folder, f"--expect={missing}")
    assert str(missing) in out
    assert "parity golden" in out

    missing.write_bytes(b"not an npz")
    assert str(missing) in refused("check", folder, f"--expect={missing}")

    np.savez(missing, something=np.ones(3))
    out = refused("check", folder, f"--expect={missing}")
    assert "something" in out
    assert "fwd" in out


def test_golden_of_another_model(plain_rows, tmp_path):
    """Another vocabulary: no token is silently taken for another."""
    other = dict(plain_rows)
    other["fwd/65/logits"] = other["fwd/65/logits"][..., :11]
    status, out = check_oracle(other, tmp_path / "golden.npz")
    assert status == 2
    for word in ("fwd/65/logits", "(2, 65, 11)", "(2, 65, 96)", "another model"):
        assert word in out


def test_golden_of_a_deeper_model(plain_rows, tmp_path):
    shape = (*plain_rows["fwd/65/input_ids"].shape, 32)
    deeper = {**plain_rows, "hidden65/layer_99": np.zeros(shape, np.float32)}
    status, out = check_oracle(deeper, tmp_path / "golden.npz")
    assert status == 2
    assert "layer_99" in out
    assert "another model" in out


@pytest.mark.parametrize("lacks", ["fwd/65/input_ids", "fwd/65/logits"])
def test_golden_that_is_not_complete(lacks, plain_rows, tmp_path):
    part = {key: value for key, value in plain_rows.items() if key != lacks}
    status, out = check_oracle(part, tmp_path / "golden.npz")
    assert status == 2
    assert lacks in out
    assert "parity golden" in out
