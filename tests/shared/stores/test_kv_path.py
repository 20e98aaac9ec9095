"""Checkpoints in key-value stores: file:// and memory:// stand for gs:// and s3://."""

import numpy as np
import pytest

from shared.checkpoint import CheckpointError, native
from shared.checkpoint.convert import Target, convert, plan_conversion
from shared.checkpoint.manifest import find_manifest
from shared.checkpoint.source import open_source
from shared.stores import open_store
from shared.stores.folders import UNFINISHED, new_remote
from shared.stores.kv_path import KvPath, is_url
from tests.shared.checkpoint.checkpoints import GOLDENS, read

GOLDEN = GOLDENS / "qwen3_next_6l"


@pytest.fixture(params=["file", "memory"])
def place(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    return f"memory://{tmp_path.name}"


def test_what_a_url_is():
    assert is_url("gs://bucket/a") and is_url("s3://bucket") and is_url("memory://x/")
    assert not is_url("/a/b") and not is_url("a:b") and not is_url("C://x")


def test_names_and_what_is_kept_under_them(place):
    folder = KvPath(place)
    assert not folder.exists()
    (folder / "a" / "b.txt").write_text("née")
    (folder / "c").write_bytes(b"\x00\xff")
    assert (folder / "a" / "b.txt").read_text() == "née"
    assert (folder / "c").read_bytes() == b"\x00\xff"
    assert folder.is_dir() and (folder / "a").is_dir() and (folder / "c").is_file()
    assert not (folder / "a").is_file() and not (folder / "c").is_dir()
    assert [path.name for path in folder.iterdir()] == ["a", "c"]
    assert list(folder.glob("*/*.txt")) == [folder / "a" / "b.txt"]
    assert (folder / "a" / "b.txt").parent == folder / "a"
    with pytest.raises(FileNotFoundError, match="There is no .*nobody"):
        (folder / "nobody").read_text()
    (folder / "c").unlink()
    assert [path.name for path in folder.iterdir()] == ["a"]
    folder.clear()
    assert not folder.exists()


def test_a_checkpoint_goes_there_and_comes_back(place, tmp_path):
    zoo, maxtext = f"{place}/zoo", f"{place}/maxtext"
    alone = convert(plan_conversion(open_source(GOLDEN), Target("zoo")), tmp_path / "z")
    plan = plan_conversion(open_source(GOLDEN), Target("zoo"))
    assert convert(plan, zoo) == alone
    convert(plan_conversion(open_source(zoo), Target("maxtext")), maxtext)
    convert(plan_conversion(open_source(maxtext), Target("hf")), tmp_path / "hf")
    stored, expected = read(tmp_path / "hf"), read(GOLDEN)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored[name], tensor, strict=True)
    assert find_manifest(KvPath(zoo)) == find_manifest(tmp_path / "z")
    config, params = native.load(zoo)
    assert params["norm"].shape == (config.hidden_size,)
    assert (KvPath(zoo) / "generation_config.json").is_file()


def test_what_is_not_finished_is_never_taken_for_whole(place):
    """A writer that was killed leaves its marker; the next one starts anew."""
    folder = KvPath(f"{place}/zoo")
    plan = plan_conversion(open_source(GOLDEN), Target("zoo"))
    convert(plan, str(folder))
    (folder / UNFINISHED).write_text("killed")
    with pytest.raises(CheckpointError, match="was not finished"):
        open_store(str(folder))
    (folder / "params.norm" / "stale").write_text("old")
    convert(plan, str(folder))
    assert not (folder / UNFINISHED).exists()
    assert not (folder / "params.norm" / "stale").exists()
    open_store(str(folder))


def test_what_fails_leaves_nothing(place):
    folder = KvPath(f"{place}/zoo")
    with pytest.raises(RuntimeError), new_remote(folder):
        (folder / "a").write_text("half")
        raise RuntimeError
    assert not folder.exists()


def test_what_is_there_is_left_alone(place):
    folder = KvPath(f"{place}/zoo")
    (folder / "mine").write_text("mine")
    plan = plan_conversion(open_source(GOLDEN), Target("zoo"))
    with pytest.raises(CheckpointError, match="exists. It has mine. Give another name"):
        convert(plan, str(folder))
    assert (folder / "mine").read_text() == "mine"
    with pytest.raises(CheckpointError, match="is no checkpoint of orbax"):
        open_store(str(folder))


def test_what_does_not_go_there_is_told(place):
    plan = plan_conversion(open_source(GOLDEN), Target("hf"))
    with pytest.raises(CheckpointError, match="to a URL one process writes zoo"):
        convert(plan, f"{place}/hf")
    assert not KvPath(f"{place}/hf").exists()


def test_a_changed_byte_is_named(place):
    folder = KvPath(f"{place}/zoo")
    convert(plan_conversion(open_source(GOLDEN), Target("zoo")), str(folder))
    chunk = folder / "params.norm" / "0"
    data = chunk.read_bytes()
    chunk.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CheckpointError, match="params/norm: its SHA-256 is"):
        native.load(str(folder))
