"""Two processes on a mesh of four devices train as one on one device does."""

import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from shared import sharding, training
from shared.sharding import ShardingError
from tests.shared.training import two_processes as script
from tests.shared.training.test_on_a_mesh import assert_near


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("processes") / "results.npz"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, pathlib.Path(script.__file__), file, port]
    running = [
        subprocess.Popen(
            [*map(str, command), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    found = {frontend: {} for frontend in script.FRONTENDS}
    with np.load(file) as arrays:
        for key in arrays:
            frontend, name = key.split("|")
            found[frontend][name] = arrays[key]
    return found


def test_loss_and_gradients_are_those_of_one_process(results):
    """Here all rows are in one program without a mesh; each of the two had half."""
    step = jax.jit(lambda b: script.step_of("linen")(script.first_state(), b))
    whole = step(script.rows(0, 8))
    assert_near(results["linen"], jax.device_get(whole))
    assert results["linen"]["tokens"] == 7 * 11 + 1


def test_frontends_are_equal_to_the_bit_in_two_processes(results):
    linen, nnx = (results[frontend] for frontend in script.FRONTENDS)
    assert linen.keys() == nnx.keys()
    for name, leaf in linen.items():
        np.testing.assert_array_equal(leaf, nnx[name], err_msg=name)


def test_a_batch_stands_by_its_rows_and_lengths():
    mesh = sharding.make_mesh({"data": 1, "context": 1}, jax.devices()[:1])
    batch = script.rows(0, 8) | {"positions": np.zeros((3, 8, 12), np.int32)}
    placed = training.place_batch(batch, mesh)
    for name, leaf in batch.items():
        np.testing.assert_array_equal(placed[name], leaf)
        assert tuple(placed[name].sharding.spec)[-2:] == ("data", "context")


def test_rows_that_do_not_divide_are_told(monkeypatch):
    mesh = sharding.make_mesh({"data": 1}, jax.devices()[:1])

    def refuse(place, array):
        raise ValueError("not divisible")

    monkeypatch.setattr(jax, "make_array_from_process_local_data", refuse)
    with pytest.raises(ShardingError, match=r"tokens \[8, 12\] of a batch .*'data': 1"):
        training.place_batch(script.rows(0, 8), mesh)
