"""`parity train`: what it says and writes, what it resumes, what it refuses."""

import io
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rich.console

import parity.__main__
import shared
import zoo_linen
import zoo_nnx
from parity.training import outputs, session, settings
from shared import training
from shared.checkpoint.training import Manager
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny
from shared.training import Placement, data

CONFIG = qwen3_next_tiny(1).replace(layers=(LayerKind("full_attention", "dense"),))
SHAPE = ["--batch=2", "--length=12", "--log-every=1", "--learning-rate=0.01"]


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    status = parity.__main__.main(["train", *map(str, argv)], console)
    return status, out.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of ours with one layer, which compiles fast."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    params = shared.init_params(jax.random.key(0), CONFIG)
    shared.checkpoint.save(folder, CONFIG, params)
    return folder


def lines(file):
    return [json.loads(text) for text in file.read_text().splitlines()]


def losses(file):
    """By step, the bits of the loss and of the gradient's norm."""
    told = [(x["step"], x["loss"].hex(), x["gradient_norm"].hex()) for x in lines(file)]
    assert [step for step, *_ in told] == list(range(1, len(told) + 1))
    return told


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    """Eight steps at once: their losses, and the folder."""
    folder = tmp_path_factory.mktemp("run")
    status, text = main(
        model,
        *SHAPE,
        "--steps=8",
        f"--metrics={folder / 'metrics.jsonl'}",
        f"--checkpoints={folder / 'steps'}",
        "--save-every=3",
        f"--json={folder / 'result.json'}",
        f"--tensorboard={folder / 'events'}",
    )
    assert status == 0, text
    return folder, text, losses(folder / "metrics.jsonl")


def digests(folder, step):
    manifest = json.loads((folder / str(step) / "default/manifest.json").read_text())
    return {path: leaf["sha256"] for path, leaf in manifest["leaves"].items()}


def test_what_it_says_is_what_the_step_says(uninterrupted, model):
    """Beside a loop over the trainer, which test_training compares, to the bit."""
    folder, text, told = uninterrupted
    options = training.OptimizerConfig(learning_rate=0.01)
    optimizer = training.make_optimizer(options, CONFIG)
    state = training.init_state(shared.checkpoint.load(model)[1], optimizer)
    trainer = zoo_linen.Trainer(CONFIG, state, optimizer)
    batches = data.SyntheticTokens(CONFIG.vocab_size, 2, 12, seed=0)
    rows = [row for row in text.splitlines() if row.startswith("step ")]
    for number, row in enumerate(rows):
        said = trainer.step(batches(number))
        loss, norm = (float(x).hex() for x in (said.loss, said.gradient_norm))
        assert told[number] == (number + 1, loss, norm)
        assert row.startswith(f"step {number + 1}  loss {said.loss:.6f}")
        assert f"cross entropy {said.cross_entropy:.6f}" in row
        assert "learning rate 1.000e-02" in row and row.endswith(" MB")
    assert text.count("tokens/s") == 7 and text.count("compiling") == 1


def test_what_it_writes(uninterrupted):
    folder, text, told = uninterrupted
    result = json.loads((folder / "result.json").read_text())
    assert result["records"] == lines(folder / "metrics.jsonl")
    assert (result["first_step"], result["last_step"]) == (0, 8)
    assert result["settings"]["learning_rate"] == 0.01
    with ocp.CheckpointManager(folder / "steps") as manager:
        assert sorted(manager.all_steps()) == [3, 6, 8]
    assert f"done: 8 steps, saved in {folder / 'steps'}" in text


def test_what_tensorboard_sees(uninterrupted):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX")
    from tensorboardX.proto import event_pb2

    folder, _, _ = uninterrupted
    (file,) = (folder / "events").iterdir()
    content, found = file.read_bytes(), {}
    while content:  # a record: length, its checksum, bytes, their checksum
        (size,) = struct.unpack("<Q", content[:8])
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
        content = content[16 + size :]
    told = lines(folder / "metrics.jsonl")
    for name in ("loss", "gradient_norm", "learning_rate"):
        seen = [found[f"train/{name}", step] for step in range(1, 9)]
        np.testing.assert_array_equal(seen, np.float32([row[name] for row in told]))


def test_a_run_in_two_halves_is_the_run(uninterrupted, model, tmp_path):
    """NNX goes on with what Linen has saved, to the same bytes."""
    whole, _, told = uninterrupted
    files = [f"--metrics={tmp_path / 'm'}", f"--checkpoints={tmp_path / 'steps'}"]
    assert main(model, *SHAPE, *files, "--steps=5")[0] == 0
    status, text = main(model, *SHAPE, *files, "--steps=8", "--frontend=nnx")
    assert status == 0 and "resumed from step 5" in text
    assert losses(tmp_path / "m") == told
    assert digests(tmp_path / "steps", 8) == digests(whole / "steps", 8)
    status, text = main(model, *SHAPE, *files, "--steps=8")
    assert status == 0 and "nothing to do" in text
    assert losses(tmp_path / "m") == told


class Killed(BaseException):
    """What no handler of errors sees, as none sees a killed process."""


def test_a_run_that_is_killed_again_and_again_is_the_run(
    uninterrupted, model, tmp_path, monkeypatch
):
    """At drawn steps, and in the middle of a line."""
    _, _, told = uninterrupted
    argv = [model, *SHAPE, "--steps=8", "--save-every=2"]
    argv += [f"--metrics={tmp_path / 'm'}", f"--checkpoints={tmp_path / 'steps'}"]
    step_of = zoo_linen.Trainer.step
    for last in sorted(np.random.default_rng(0).choice(7, 2, replace=False)):

        def step(self, batch, last=last):
            if int(self.state.step) == last:
                raise Killed
            return step_of(self, batch)

        monkeypatch.setattr(zoo_linen.Trainer, "step", step)
        with pytest.raises(Killed):
            main(*argv)
        with (tmp_path / "m").open("a") as stream:
            stream.write('{"step": 9, "loss')
    monkeypatch.undo()
    assert main(*argv)[0] == 0
    assert losses(tmp_path / "m") == told


def test_a_process_that_is_killed_resumes(uninterrupted, model, tmp_path):
    """By SIGKILL, when a drawn line is there."""
    _, _, told = uninterrupted
    metrics, steps = tmp_path / "m", tmp_path / "steps"
    argv = [str(model), *SHAPE, "--steps=8", "--save-every=1"]
    argv += [f"--metrics={metrics}", f"--checkpoints={steps}", "--keep=2"]
    program = "import sys, parity.__main__ as m; sys.exit(m.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "train", *argv],
        cwd=pathlib.Path(shared.__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    drawn = np.random.default_rng(1).integers(2, 7)
    try:
        for line in process.stdout:
            if line.startswith(f"step {drawn} "):
                break
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    assert session.saved_steps(steps)
    status, text = main(*argv)
    assert status == 0 and "resumed from step" in text
    assert losses(metrics) == told


def test_a_signal_ends_the_run_with_a_checkpoint(
    uninterrupted, model, tmp_path, monkeypatch
):
    whole, _, _ = uninterrupted
    number = signal.SIGTERM
    step_of = zoo_linen.Trainer.step

    def step(self, batch):
        if int(self.state.step) == 2:
            os.kill(os.getpid(), number)
        return step_of(self, batch)

    monkeypatch.setattr(zoo_linen.Trainer, "step", step)
    before = signal.getsignal(number)
    files = [f"--metrics={tmp_path / 'm'}", f"--checkpoints={tmp_path / 'steps'}"]
    status, text = main(model, *SHAPE, *files, "--steps=8", "--log-every=5")
    assert status == 128 + number and f"{number.name}: stopped at step 3" in text
    assert signal.getsignal(number) is before
    assert session.saved_steps(tmp_path / "steps") == [3]
    assert digests(tmp_path / "steps", 3) == digests(whole / "steps", 3)
    assert [row["step"] for row in lines(tmp_path / "m")] == [3]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(model, tmp_path):
    argv = [model, *SHAPE, "--learning-rate=1e30", "--clip-norm=0", "--steps=8"]
    status, text = main(*argv, "--save-every=1", f"--checkpoints={tmp_path / 'steps'}")
    assert status == 1 and "of step 2 is nan" in text.replace("inf", "nan")
    assert session.saved_steps(tmp_path / "steps") == [1]


# Both frontends.


def test_both_are_compared_on_a_mesh(uninterrupted, model, tmp_path):
    """Which has one device here, and gives the losses without it within rounding."""
    _, _, told = uninterrupted
    argv = [model, *SHAPE, "--steps=3", "--compare", "--mesh=fsdp=-1"]
    status, text = main(*argv, f"--json={tmp_path / 'r.json'}")
    assert status == 0, text
    assert "mesh fsdp=-1 of 1 devices" in text
    assert text.count(" equal\n") == 3 and "proved" in text
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["step"] for row in result["steps"]] == [1, 2, 3]
    for row, (_, loss, _) in zip(result["steps"], told, strict=False):
        assert row["equal"] and row["losses"]["linen"] == row["losses"]["nnx"]
        assert abs(row["losses"]["nnx"] - float.fromhex(loss)) < 2e-5
    (tier,) = result["report"]["tiers"]
    # Four of each step, all of the state: parameters, two moments, three counts.
    leaves = len(jax.tree.leaves(shared.abstract_params(CONFIG)))
    assert tier["leaves"] == 3 * 4 + 3 * leaves + 3


def test_a_difference_in_the_last_bit_is_seen(model, monkeypatch):
    update = zoo_nnx.training.update

    def other(*given):
        params, opt_state = update(*given)
        return params | {"norm": params["norm"] * np.float32(1 + 2e-7)}, opt_state

    monkeypatch.setattr(zoo_nnx.training, "update", other)
    status, text = main(model, *SHAPE, "--steps=1", "--compare")
    assert status == 1 and "last state/params/norm" in text


# Settings.


def write(path, value):
    path.write_text(json.dumps(value))
    return path


def test_flags_win_over_the_file_and_that_over_the_recipe(tmp_path):
    file = write(tmp_path / "c.json", {"steps": 5, "seed": 7, "mesh": "fsdp=2,data=1"})
    told = settings.merge({"seed": 9, "b1": None}, file=file, recipe="qwen3-next-tiny")
    recipe = settings.read_recipe("qwen3-next-tiny")
    assert told["seed"] == 9 and told["steps"] == 5
    assert told["length"] == recipe["length"] and told["target"] == recipe["target"]
    assert told["b1"] == 0.9 and told["mesh"] == ["fsdp=2", "data=1"]
    assert told.keys() == {"target", *(setting.name for setting in settings.SETTINGS)}


def test_a_batch_a_device_wins_where_it_is_said_later(tmp_path):
    file = write(tmp_path / "c.json", {"target": "x", "batch_per_device": 3})
    assert settings.merge({}, file=file)["batch_per_device"] == 3
    assert settings.merge({"batch": 4}, file=file)["batch_per_device"] is None
    with pytest.raises(settings.SettingsError, match="say the same"):
        settings.merge({"batch": 4, "batch_per_device": 2}, file=file)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "must be a JSON object"),
        ({"stepz": 3}, "'stepz', which is no setting"),
        ({"steps": "3"}, 'steps cannot be "3"'),
        ({"steps": 0}, "steps cannot be 0"),
        ({"steps": 2.5}, "steps cannot be 2.5"),
        ({"steps": None}, "steps cannot be null"),
        ({"scan_layers": 1}, "scan_layers cannot be 1"),
        ({"learning_rate": True}, "learning_rate cannot be true"),
        ({"frontend": "haiku"}, 'frontend cannot be "haiku"'),
        ({"target": 3}, "target cannot be 3"),
        ({"mesh": [3]}, "mesh cannot be [3]"),
    ],
)
def test_a_file_with_other_settings_is_told(tmp_path, value, words):
    status, text = main(f"--config={write(tmp_path / 'c.json', value)}")
    assert status == 2 and words in text


def test_the_published_recipe_has_the_peers_arguments():
    """4,999,727,104 bytes of parameters and two moments on each of four chips."""
    told = settings.merge({}, recipe="qwen3-next-12-layers")
    config, folder = session.resolve_config(told, Placement())
    assert folder is None and config.remat_policy == "full"
    assert (config.dtype, config.param_dtype) == ("bfloat16", "float32")
    assert len(config.layers) == 12 and config.moe.num_experts == 32
    assert config.scan_layers and told["data"] == "synthetic"
    leaves = jax.tree.leaves(shared.abstract_params(config))
    held = sum(3 * leaf.size * leaf.dtype.itemsize for leaf in leaves) / 4
    assert abs(held / 4_999_727_104 - 1) < 0.01
    assert (told["batch_per_device"], told["length"], told["mesh"]) == (
        2,
        4096,
        ["fsdp=-1"],
    )


def test_every_recipe_makes_a_run():
    for name, about in settings.recipes().items():
        told = settings.merge({"mesh": [], "batch": 1, "length": 8}, recipe=name)
        assert about
        # Of each the model alone; the large one does not fit here.
        config, _ = session.resolve_config(told, Placement())
        training.OptimizerConfig(
            **{f: told[f] for f in training.OptimizerConfig.__dataclass_fields__}
        )
        assert config.layers


def test_a_line_of_metrics_is_kept_to_the_bit(tmp_path):
    value = float(np.float32(1) / np.float32(3))
    record = training.Record(3, value, 1.0, 0.0, None, 2.0, 1e-3, 24, None)
    with outputs.json_lines(str(tmp_path / "m"), 0) as report:
        report(record)
    (row,) = lines(tmp_path / "m")
    assert training.Record(**row) == record


# Bad input.


def test_bad_input_is_told_before_anything_is_written(model, tmp_path):
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(np.arange(0, 200, 2, dtype="<u2").tobytes())
    raw = [f"--data={tokens}", "--token-dtype=uint16"]
    saved = tmp_path / "run"
    before = sorted(tmp_path.rglob("*"))
    for argv, words in (
        ([], "There is no target"),
        ([model, "x"], "Got 2"),
        (["no-such-model"], "neither a preset"),
        ([model, "--recipe=no-such"], "There is no recipe 'no-such'"),
        ([model, "--steps=0"], "0"),
        ([model, "--batch=3", "--accumulation-steps=2"], "does not divide the 3 rows"),
        ([model, "--batch=3", "--batch-per-device=2"], "say the same"),
        ([model, "--learning-rate=0"], "learning_rate must be positive"),
        ([model, "--decay-steps=3", "--warmup-steps=3"], "decay_steps=3 must be after"),
        ([model, f"--data={tmp_path / 'none.npy'}"], "none.npy"),
        ([model, f"--data={tokens}"], "give one of uint16, uint32"),
        ([model, *raw], "token 96 at place 48"),
        ([model, *raw, "--length=101"], "token 96 at place 48"),
        ([model, "--mesh=fsdp=2"], "does not make up the 1 devices"),
        ([model, "--mesh=rows=1"], "'rows=1'"),
        ([model, "--num-layers=1"], "has weights of 1 layers"),
        (["qwen3-next-tiny", "--num-layers=7"], "the preset has 6"),
        (["gemma-3-tiny", "--num-experts=2"], "the preset has none"),
        ([model, "--compare"], "--compare trains both"),
        (["qwen3-next-80b-a3b"], "and there are"),
        ([model, f"--tensorboard={tokens}"], "that is no folder"),
        ([model, f"--metrics={tmp_path / 'no' / 'm'}"], "there is no such folder"),
        ([model, "--dtype=float64"], "JAX_ENABLE_X64"),
        ([model, "--remat-policy=some"], "remat_policy='some' is unknown"),
    ):
        status, text = main(*argv, f"--checkpoints={saved}")
        assert status == 2 and words in text, (argv, text)
        assert sorted(tmp_path.rglob("*")) == before, argv


def test_a_checkpoint_of_another_run_is_told_with_both_values(
    uninterrupted, model, tmp_path
):
    folder, _, _ = uninterrupted
    argv = [*SHAPE, f"--checkpoints={folder / 'steps'}", "--steps=9"]
    status, text = main(model, *argv, "--seed=4", "--weight-decay=0.2")
    assert status == 2
    assert "seed: begun with 0, given 4" in text
    assert "weight_decay: begun with 0.1, given 0.2" in text
    status, text = main(model, *argv, "--noscan-layers")
    assert status == 2 and "scan_layers: saved with True, given False" in text
    other = tmp_path / "other"
    config = CONFIG.replace(max_position_embeddings=256)
    shared.checkpoint.save(other, config, shared.checkpoint.load(model)[1])
    status, text = main(other, *argv)
    assert status == 2
    assert "max_position_embeddings: saved with 512, given 256" in text
    assert session.saved_steps(folder / "steps") == [3, 6, 8]
    with Manager(folder / "steps", CONFIG) as manager:
        assert manager.latest_step() == 8
