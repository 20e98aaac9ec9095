"""`parity migrate`: what it prints and writes, and what kills and damage leave."""

import io
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import linen as nn
from flax import nnx

import parity.__main__
from parity import migration
from parity.diff import diff
from shared.checkpoint.manifest import find_manifest
from shared.stores import digest, open_store
from shared.stores.folders import partial_folder
from tests.parity.migrations.models import (
    CNN,
    LIST,
    NNXCNN,
    STACK,
    NNXList,
    make_stack,
    save_manager,
    save_standard,
)

ROOT = pathlib.Path(__file__).parents[3]
MODELS = "tests.parity.migrations.models"

# What --linen, --nnx, --inputs and --check name in these tests.
list_linen, list_inputs = LIST.linen, LIST.inputs
cnn_linen, cnn_inputs = CNN.linen, CNN.inputs


NNX = f"--nnx={__name__}:NNXList"
LINEN = (f"--linen={__name__}:list_linen", f"--inputs={__name__}:list_inputs")


def list_pair():
    return LIST.linen, NNXList, LIST.inputs


def cnn_pair():
    return CNN.linen, NNXCNN, CNN.inputs


def other_pair():
    """An NNX model that computes something else with the same leaves."""

    class Backwards(NNXList):
        def __call__(self, x):
            for layer in reversed(list(self.layers)):
                x = layer(x)
            return x

    return LIST.linen, Backwards, LIST.inputs


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    status = parity.__main__.main(["migrate", *map(str, argv)], console)
    return status, out.getvalue()


def content(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_manager(LIST.state, tmp_path_factory.mktemp("command") / "list")


# What it does.


def test_a_dry_run_writes_nothing(source, tmp_path):
    before = content(source)
    status, out = main(source, tmp_path / "out", "--to=nnx", NNX)
    assert status == 0, out
    assert "nothing was written: --write writes it" in out
    assert "with its parameters: opt_state/0/mu (12 leaves)" in out
    assert list(tmp_path.iterdir()) == []
    assert content(source) == before


def test_write_check_and_json(source, tmp_path):
    target, file = tmp_path / "out", tmp_path / "plan.json"
    status, out = main(
        source,
        target,
        "--to=nnx",
        NNX,
        "--write",
        "--step=9",
        f"--check={__name__}:list_pair",
        f"--json={file}",
    )
    assert status == 0, out
    assert "38 leaves, read back" in out
    data = json.loads(file.read_text())
    assert data["ok"] is True
    assert data["step"] == 9
    assert data["written"] == str(target)
    assert data["check"]["ok"] is True
    tiers = {tier["tier"]: tier["status"] for tier in data["check"]["tiers"]}
    assert tiers["init"] == tiers["bits"] == "proved"
    assert data["carried"] == ["opt_state/0/count", "step"]
    moves = {move["sources"][0]: move["targets"] for move in data["moves"]}
    assert moves["params/layers_10/kernel"] == ["model/layers/10/kernel/value"]
    assert data["leaves"].keys() == find_manifest(target).leaves.keys()
    back = tmp_path / "back"
    status, out = main(target, back, "--to=linen", *LINEN, "--write", "--list")
    assert status == 0, out
    assert "model/layers/11/kernel/value -> params/layers_11/kernel" in out
    assert diff(open_store(source, 9), open_store(back)).equal


def test_a_dry_run_is_proved_before_anything_is_written(source, tmp_path):
    status, out = main(
        source, tmp_path / "out", "--to=nnx", NNX, f"--check={__name__}:list_pair"
    )
    assert status == 0, out
    assert "init" in out
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_computes_something_else_fails_the_check(source, tmp_path):
    status, out = main(
        source, tmp_path / "out", "--to=nnx", NNX, f"--check={__name__}:other_pair"
    )
    assert status == 1
    assert "bits" in out


def test_rules_of_a_file_and_the_check_of_the_cnn(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(
        "[[rule]]\nlinen = 'params/Dense_0/(kernel|bias)'\nnnx = 'params/head/\\1'\n"
    )
    state = CNN.state
    save_standard(state, tmp_path / "x")
    status, out = main(
        tmp_path / "x",
        tmp_path / "out",
        "--to=nnx",
        f"--nnx={__name__}:NNXCNN",
        f"--rules={rules}",
        "--write",
        f"--check={__name__}:cnn_pair",
    )
    assert status == 0, out
    assert "model: 2 rule 1" in out


def test_differences_are_listed_and_give_one(source, tmp_path):
    file = tmp_path / "plan.json"
    status, out = main(
        source,
        tmp_path / "out",
        "--to=nnx",
        f"--nnx={__name__}:NNXCNN",
        "--write",
        f"--json={file}",
    )
    assert status == 1
    assert "NOT POSSIBLE: 20 differences" in out
    assert "params/layers_11/kernel: missing: only in linen" in out
    assert not (tmp_path / "out").exists()
    assert not partial_folder(tmp_path / "out").exists()
    data = json.loads(file.read_text())
    assert (data["ok"], data["written"]) == (False, None)
    assert len(data["differences"]) == 20


class Blocks(nn.Module):
    """Blocks in which biases of a norm and of a product have one shape."""

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = BlockOf(name=f"blocks_{i}")(x)
        return x


class BlockOf(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(4)(x)


class NNXBlocks(nnx.Module):
    def __init__(self, rngs):
        make = lambda: nnx.Dict(
            bn=nnx.BatchNorm(4, rngs=rngs), fc=nnx.Linear(4, 4, rngs=rngs)
        )
        self.blocks = nnx.List([make() for _ in range(3)])


class NNXHead(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(4, 7, rngs=rngs)


class Headed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(7)(x)


def test_where_several_leaves_may_be_meant_no_rule_is_proposed(tmp_path):
    variables = Blocks().init(jax.random.key(0), jnp.ones((1, 4)))
    source = save_standard(variables, tmp_path / "x")
    status, out = main(
        source, tmp_path / "out", "--to=nnx", f"--nnx={__name__}:NNXBlocks"
    )
    assert status == 1
    assert "A rule:" not in out and "/fc/" not in out.partition("blocks/0/bn")[0]
    assert "In nnx 15 leaves of its shape are left" in out  # five of each block
    # A line for each of six leaves of a block on either side, not for each block.
    assert out.count(": missing: ") == 12
    assert "params/blocks_2/Dense_0/kernel: missing: only in linen" in out
    assert "and so 2 more, from params/blocks_0/Dense_0/kernel" in out
    assert out.splitlines()[-2].startswith(
        "`parity suggest --linen=pkg.mod:name --nnx="
    )
    assert len(out.splitlines()) < 20


def test_where_one_leaf_can_be_meant_its_rule_is_proposed(tmp_path):
    variables = Headed().init(jax.random.key(0), jnp.ones((1, 4)))
    source = save_standard(variables, tmp_path / "x")
    status, out = main(
        source, tmp_path / "out", "--to=nnx", f"--nnx={__name__}:NNXHead"
    )
    assert status == 1
    for name in ("kernel", "bias"):
        rule = f"linen = 'params/Dense_0/{name}' and nnx = 'params/head/{name}'"
        assert out.count(f"A rule: [[rule]] with {rule}") == 2  # of either side


def test_a_checkpoint_that_is_linens_already_is_told(tmp_path):
    source = save_standard(LIST.variables, tmp_path / "x")
    status, out = main(source, tmp_path / "out", "--to=linen", *LINEN)
    told = f"{source} already has the names of the Linen module"
    assert (status, told in out, "--to=nnx is meant" in out) == (0, True, True)
    _, out = main(source, tmp_path / "out", "--to=nnx", NNX)
    assert "already has" not in out


@pytest.mark.parametrize(
    ("user", "tree", "to", "told"),
    [
        (LIST, lambda: nnx.state(NNXList(nnx.Rngs(0))), "nnx", True),
        (LIST, lambda: {"model": nnx.state(NNXList(nnx.Rngs(0)))}, "nnx", True),
        (STACK, lambda: nnx.state(make_stack(nnx.Rngs(0))), "linen", False),
        (STACK, lambda: STACK.state, "nnx", False),  # boxed, and names are the same
    ],
)
def test_only_what_looks_like_the_target_is_told(user, tree, to, told, tmp_path):
    modules = {
        "nnx": {"nnx": user.nnx},
        "linen": {"linen": user.linen, "inputs": user.inputs},
    }
    source = save_standard(tree(), tmp_path / "x")
    plan = migration.plan(source, to=to, **modules[to])
    assert any("already has the names" in line for line in plan.describe()) is told


def test_one_rule_file_leaves_out_rng_state_in_both_directions(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(
        "[[rule]]\nlinen = 'params/Dense_0/(kernel|bias)'\nnnx = 'params/head/\\1'\n"
        "[[ignore]]\nnnx = 'nnx_rngs/.*'\nreason = 'a new run draws new masks'\n"
    )
    flags = [f"--rules={rules}", f"--check={__name__}:cnn_pair", "--write"]
    state = nnx.state(NNXCNN(nnx.Rngs(0)))
    source = save_standard(nnx.to_pure_dict(state), tmp_path / "nnx")
    linen = [f"--linen={__name__}:cnn_linen", f"--inputs={__name__}:cnn_inputs"]
    status, out = main(source, tmp_path / "linen", "--to=linen", *linen, *flags)
    assert status == 0 and "left out: 2 beside the model, ignore 1" in out, out
    status, out = main(
        tmp_path / "linen",
        tmp_path / "back",
        "--to=nnx",
        f"--nnx={__name__}:NNXCNN",
        *flags,
    )
    assert status == 0, out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("SRC",), "Give SRC and DST. Got 1"),
        (("SRC", "DST"), "Give --to=nnx or --to=linen"),
        (("SRC", "DST", "--to=torch"), "--to=torch"),
        (
            ("SRC", "DST", "--to=nnx", "--inputs=no.module:thing"),
            "--inputs is for --linen",
        ),
        (
            ("SRC", "DST", "--to=nnx", "--linen=no.module:thing"),
            "--linen=no.module:thing",
        ),
        (("SRC", "DST", "--to=nnx", "--step=4"), "has no step 4. It has 9, 10"),
        (("SRC", "DST", "--to=nnx", "--params=weights"), "no node 'weights'"),
        (("SRC", "DST", "--to=nnx", "--rules=none.toml"), "none.toml cannot be read"),
        (("SRC", "DST", "--to=nnx", "--rules=none.toml"), "there is no such file.\n"),
        (("SRC", "DST", "--to=linen", LINEN[0]), "needs --inputs=pkg.mod:name"),
        (("SRC", "DST", "--to=nnx", "--json=/no/x"), "--json=/no/x"),
        (("SRC", "SRC", "--to=nnx"), "which is never touched"),
        (("nothing", "DST", "--to=nnx"), "There is no nothing"),
    ],
)
def test_bad_input_gives_two_and_says_what(argv, words, source, tmp_path):
    named = {"SRC": source, "DST": tmp_path / "out"}
    status, out = main(*(named.get(word, word) for word in argv))
    assert (status, "Traceback" in out) == (2, False)
    assert words in out
    assert list(tmp_path.iterdir()) == []


# Damage.


@pytest.fixture
def migrated(source, tmp_path):
    """A checkpoint with a manifest, to be damaged."""
    status, out = main(source, tmp_path / "nnx", "--to=nnx", NNX, "--write")
    assert status == 0, out
    return tmp_path / "nnx"


def chunk_of(folder, leaf):
    [file] = [f for f in (folder / leaf).iterdir() if f.name != ".zarray"]
    return file


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_is_found_before_anything_is_written(migrated, tmp_path):
    flip(chunk_of(migrated, "model.layers.7.kernel.value"))
    status, out = main(migrated, tmp_path / "back", "--to=linen", "--write")
    assert status == 2
    assert "model/layers/7/kernel/value: its SHA-256 is" in out
    assert "1 of 38 leaves" in out
    assert not (tmp_path / "back").exists()
    assert not partial_folder(tmp_path / "back").exists()


@pytest.mark.parametrize("damage", ["truncated", "absent"])
def test_a_truncated_or_absent_chunk_is_named(damage, migrated, tmp_path):
    file = chunk_of(migrated, "opt_state.0.mu.layers.3.kernel.value")
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-5])
    status, out = main(migrated, tmp_path / "back", "--to=linen", "--write")
    assert status == 2
    assert "opt_state/0/mu/layers/3/kernel/value" in out
    assert not (tmp_path / "back").exists()


def test_a_leaf_that_the_manifest_does_not_know_is_named(migrated, tmp_path):
    shutil.rmtree(migrated / "model.layers.2.kernel.value")
    tree = json.loads((migrated / "_METADATA").read_text())
    tree["tree_metadata"] = {
        key: node
        for key, node in tree["tree_metadata"].items()
        if "'2'" not in key or "model" not in key
    }
    (migrated / "_METADATA").write_text(json.dumps(tree))
    status, out = main(migrated, tmp_path / "back", "--to=linen")
    assert status == 2
    assert "missing: model/layers/2/kernel/value" in out


def test_a_source_of_orbax_that_is_cut_short_is_named(tmp_path):
    """It has no manifest: what is read does not fit."""
    tree = {"params": {f"l{i}": {"w": jnp.full((64, 64), 1.0 * i)} for i in range(4)}}
    save_standard(tree, tmp_path / "x")
    files = [f for f in (tmp_path / "x").rglob("*") if f.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1000])
    status, out = main(tmp_path / "x", tmp_path / "out", "--to=nnx", "--write")
    assert status == 2, out
    assert "fetch or write it again" in out
    assert not (tmp_path / "out").exists()
    assert not partial_folder(tmp_path / "out").exists()


# Killed at any point.

ARRAYS, ENTRIES = 24, 2**19  # of 2 MiB
LEAVES = ARRAYS + 1  # and a count


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A train state of 48 MiB, and what an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("kill")
    values = np.random.default_rng(0).integers(0, 2**31, (ARRAYS, ENTRIES), np.int32)
    half = ARRAYS // 2
    params = {f"layer_{i}": {"w": values[i].view(np.float32)} for i in range(half)}
    mu = {f"layer_{i}": {"w": values[half + i].view(np.float32)} for i in range(half)}
    tree = {"params": params, "opt_state": {"mu": mu, "count": np.int32(3)}}
    save_standard(tree, folder / "x")
    status, out = main(folder / "x", folder / "whole", "--to=nnx", "--write")
    assert status == 0, out
    return folder


def command(source, target):
    return ["migrate", str(source), str(target), "--to=nnx", "--write"]


def start(program, **options):
    return subprocess.Popen(
        [sys.executable, *program],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"},
        text=True,
        **options,
    )


# It has all imported and no thread yet when it forks, so that a run starts at once.
FORKING = """
import json, os, signal, sys, traceback
import parity.__main__
from parity import migration

def begin(command):
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        for stream in (0, 1):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        status = parity.__main__.main(command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)

for line in sys.stdin:
    what, command = json.loads(line)
    if what == "begin":
        if os.path.isdir("/proc/self/task"):
            assert len(os.listdir("/proc/self/task")) == 1
        pid, status = begin(command), None
    elif status is None:
        if what == "kill":
            os.kill(pid, signal.SIGKILL)
        done, code = os.waitpid(pid, 0 if what == "kill" else os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
    print(json.dumps(status), flush=True)
"""


class Runs:
    """Runs of the command, one at a time, each in a process of its own."""

    def __init__(self, process):
        self._process = process

    def begin(self, source, target):
        return self._ask("begin", command(source, target))

    def poll(self):
        """The exit status; None: it is running."""
        return self._ask("poll")

    def kill(self):
        """The exit status after SIGKILL, which may come too late."""
        return self._ask("kill")

    def _ask(self, *words):
        what, argv = (*words, None)[:2]
        self._process.stdin.write(json.dumps([what, argv]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def runs():
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = start(["-c", FORKING], **pipes)
    yield Runs(process)
    process.communicate(timeout=60)
    assert process.returncode == 0


def finished(target):
    """How many leaves the journal of a run says are written."""
    journal = partial_folder(target) / "journal.jsonl"
    try:
        return max(0, journal.read_text().count("\n") - 1)
    except FileNotFoundError:
        return 0


def reached(target, point, started):
    """Whether a run has written so many leaves; one more is the reading back."""
    if point <= LEAVES:
        return finished(target) >= point
    try:
        manifest = partial_folder(target) / "manifest.json"
        return manifest.stat().st_mtime > started
    except FileNotFoundError:
        return False


def run_and_kill(runs, source, target, point, delay):
    """Kills a run some time after it has come to a point.

    Returns:
      Whether it was still running.
    """
    started = time.time()
    runs.begin(source, target)
    while runs.poll() is None and not reached(target, point, started):
        time.sleep(0.0005)
    time.sleep(delay)
    status = runs.kill()
    assert status in (0, -signal.SIGKILL)
    return status != 0


def check_kills(runs, large, target, kills, seed):
    source, draw = large / "x", random.Random(seed)
    before = {file: digest_of(file) for file in source.rglob("*") if file.is_file()}
    killed = 0
    while killed < kills:
        done = finished(target)
        if done == LEAVES and draw.random() < 0.7:
            shutil.rmtree(partial_folder(target))
            done = 0
        point = draw.randint(done + 1, LEAVES + 1)
        was_running = run_and_kill(runs, source, target, point, draw.uniform(0, 0.03))
        if target.exists():  # it was quicker: whole, and begun anew
            assert content(target) == content(large / "whole")
            shutil.rmtree(target)
        else:
            assert was_running
            killed += 1
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = start(["-m", "parity", *command(source, target)], **pipes)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert content(target) == content(large / "whole")
    assert not partial_folder(target).exists()
    now = {file: digest_of(file) for file in source.rglob("*") if file.is_file()}
    assert now == before


def digest_of(file):
    return file.read_bytes(), file.stat().st_mtime_ns


def test_killed_runs_leave_nothing_half_and_the_next_one_ends_it(runs, large, tmp_path):
    check_kills(runs, large, tmp_path / "out", kills=3, seed=1)


def test_killed_twenty_times(runs, large, tmp_path):
    check_kills(runs, large, tmp_path / "out", kills=20, seed=2)


def test_a_killed_run_of_another_source_is_not_gone_on_with(runs, large, tmp_path):
    target = tmp_path / "out"
    assert run_and_kill(runs, large / "x", target, 3, 0)
    other = tmp_path / "y"
    save_standard({"params": {"a": jnp.ones(3)}}, other)
    status, out = main(other, target, "--to=nnx", "--write")
    assert status == 2
    assert "another source or other options" in out
    assert not target.exists()
    written = open_store(large / "whole")
    assert digest(written.leaves["model", "layer_0", "w", "value"], "w")
