"""Several processes write one checkpoint: the bytes of one process, or no folder."""

import dataclasses
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from shared.checkpoint import CheckpointError
from shared.checkpoint.convert import Target, convert, plan_conversion
from shared.checkpoint.sharded import Processes
from shared.checkpoint.source import open_source
from shared.stores import orbax_writer
from shared.stores.reading import read_whole
from tests.shared.checkpoint.checkpoints import GOLDENS

GOLDEN = GOLDENS / "qwen3_next_6l"


def together(count, work):
    """Runs `work(processes)` in so many threads; what each gave or raised."""
    barrier, results = threading.Barrier(count, timeout=60), [None] * count

    def one(number):
        def wait(name):
            barrier.wait()

        try:
            results[number] = work(Processes(number, count, wait))
        except CheckpointError as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("format, count", [("zoo", 3), ("maxtext", 2)])
def test_shares_give_what_one_process_gives(format, count, tmp_path, monkeypatch):
    """Blocks so small that most leaves are written in shares."""
    monkeypatch.setattr(orbax_writer, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(orbax_writer, "BLOCK_BYTES", 2048)
    monkeypatch.setattr("shared.checkpoint.sharded.BLOCK_BYTES", 2048)
    plan = plan_conversion(open_source(GOLDEN), Target(format))
    alone = convert(plan, tmp_path / "alone")
    first, *others = together(
        count, lambda processes: convert(plan, tmp_path / "all", None, processes)
    )
    assert first == alone and others == [{}] * (count - 1)
    names = {
        path.relative_to(tmp_path / "all") for path in (tmp_path / "all").rglob("*")
    }
    assert names == {
        path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*")
    }
    for name in names:
        if (tmp_path / "all" / name).is_file():
            texts = [(tmp_path / f / name).read_bytes() for f in ("all", "alone")]
            assert texts[0] == texts[1], name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "alone"]


def test_what_fails_in_one_fails_in_all_and_leaves_nothing(tmp_path):
    plan = plan_conversion(open_source(GOLDEN), Target("zoo"))

    path = ("params", "norm")
    others = [other for other in plan.leaves if other != path]
    order = [others[0], path, *others[1:]]  # the second process writes every second

    def work(processes):
        leaves = {other: plan.leaves[other] for other in order}
        if processes.number == 1:
            leaves[path] = leaves[path]._replace(open=_broken)
        mine = dataclasses.replace(plan, leaves=leaves)
        return convert(mine, tmp_path / "all", None, processes)

    first, second = together(2, work)
    assert "process 1: the disk is gone" in str(first)
    assert str(second) == "the disk is gone"
    assert list(tmp_path.iterdir()) == []


def _broken():
    raise CheckpointError("the disk is gone")


def test_a_damaged_source_is_found_by_whoever_checks_it(tmp_path):
    convert(plan_conversion(open_source(GOLDEN), Target("zoo")), tmp_path / "zoo")
    file = next((tmp_path / "zoo/params.norm").glob("[0-9]*"))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    plan = plan_conversion(open_source(tmp_path / "zoo"), Target("maxtext"))
    errors = together(2, lambda p: convert(plan, tmp_path / "all", None, p))
    assert all("params/norm: its SHA-256 is" in str(error) for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["zoo"]


def test_a_folder_with_something_in_it_is_left_alone_by_all(tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "mine.txt").write_text("mine")
    plan = plan_conversion(open_source(GOLDEN), Target("zoo"))
    errors = together(2, lambda p: convert(plan, tmp_path / "all", None, p))
    assert all("It has mine.txt" in str(error) for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


def test_two_processes_of_the_command(tmp_path):
    """With `jax.distributed`, as on two machines."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "parity", "convert", GOLDEN, tmp_path / "all"]
    command += [f"--coordinator=localhost:{port}", "--processes=2"]
    running = [
        subprocess.Popen(
            [*map(str, command), f"--process={n}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert "wrote zoo: 53 leaves" in outputs[0]
    plan = plan_conversion(open_source(GOLDEN), Target("zoo"))
    stored = open_source(tmp_path / "all")
    for name, leaf in stored.tensors.items():
        expected = plan.leaves["params", *name.split("/")]
        np.testing.assert_array_equal(
            read_whole(leaf, name), read_whole(expected, name), strict=True
        )
