"""Batches are functions of the seed and the step, and rows come once in an epoch."""

import numpy as np
import pytest

from shared.training import DataError, data

VOCAB = 300


def write(path, tokens, dtype="uint16"):
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        path.write_bytes(np.asarray(tokens, f"<{np.dtype(dtype).str[1:]}").tobytes())
    return path


def opened(folder, tokens, name="tokens.bin", dtype="uint16"):
    path = write(folder / name, tokens, dtype)
    return data.open_token_file(path, VOCAB, None if name.endswith("npy") else dtype)


def loader(name):
    if name == "grain":
        pytest.importorskip("grain", reason="needs grain: pip install -e '.[grain]'")
        return data.GrainBatches.shuffled
    return data.ShuffledBatches


loaders = pytest.mark.parametrize("name", ["numpy", "grain"])


def test_synthetic_batches_are_functions_of_seed_and_step():
    def batch(step, seed=0):
        return data.SyntheticTokens(7, batch_size=50, length=40, seed=seed)(step)[
            "tokens"
        ]

    assert batch(3).shape == (50, 40) and batch(3).dtype == np.int32
    np.testing.assert_array_equal(batch(3), batch(3))
    others = [batch(2), batch(4), batch(3, seed=1)]
    # Independent: two draws of seven agree once in seven.
    for other in others:
        assert abs((batch(3) == other).mean() - 1 / 7) < 0.05
    counts = np.bincount(batch(3).ravel(), minlength=7)
    assert counts.size == 7 and abs(counts / counts.sum() - 1 / 7).max() < 0.05


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("a.bin", "uint16"), ("a.bin", "uint32"), ("a.npy", "int64"), ("a.npy", "uint8")],
)
def test_the_tokens_of_a_file_are_read_as_they_are(tmp_path, name, dtype):
    tokens = np.random.default_rng(0).integers(0, 250, 50).astype(dtype)
    windows = data.TokenWindows(opened(tmp_path, tokens, name, dtype), 8)
    assert len(windows) == 6  # two tokens are left
    for index in range(6):
        row = windows[index]
        assert row.dtype == np.int32
        np.testing.assert_array_equal(row, tokens[8 * index : 8 * index + 8])


@loaders
@pytest.mark.parametrize("batch_size", [4, 6])
def test_every_row_comes_once_in_an_epoch(tmp_path, name, batch_size):
    """Batches that end with the epoch, and such that lie in two."""
    windows = data.TokenWindows(opened(tmp_path, np.arange(160) % VOCAB), 8)
    batches = loader(name)(windows, batch_size, 3)
    steps = 60 // batch_size  # three epochs of 20 rows
    rows = np.concatenate([batches(step)["tokens"] for step in range(steps)])
    assert rows.shape == (60, 8)
    assert (np.diff(rows, axis=1) == 1).all() and not (rows[:, 0] % 8).any()
    epochs = (rows[:, 0] // 8).reshape(3, 20)
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
    orders = {tuple(epoch) for epoch in epochs} | {tuple(range(20))}
    assert len(orders) == 4


@loaders
def test_a_batch_of_a_file_needs_no_batch_before_it(tmp_path, name):
    windows = data.TokenWindows(opened(tmp_path, np.arange(160) % VOCAB), 8)
    make = loader(name)
    first, again = make(windows, 4, 5), make(windows, 4, 5)
    in_order = [first(step)["tokens"] for step in range(12)]
    for step in (11, 2, 7):
        np.testing.assert_array_equal(again(step)["tokens"], in_order[step])
    other = make(windows, 4, 6)
    assert any((other(step)["tokens"] != in_order[step]).any() for step in range(3))


def test_grain_may_give_batches_of_its_own():
    grain = pytest.importorskip("grain", reason="needs grain")
    rows = grain.MapDataset.range(0, 6).map(lambda i: {"tokens": np.full(3, i)})
    batches = data.GrainBatches(rows.batch(2))
    np.testing.assert_array_equal(batches(1)["tokens"], [[2] * 3, [3] * 3])


@pytest.mark.parametrize(
    ("content", "name", "dtype", "words"),
    [
        (b"\x01\x00\x02", "a.bin", "uint16", "3 bytes, which are no whole number"),
        (b"\x01\x00" * 3, "a.bin", "uint32", "6 bytes, which are no whole number"),
        (b"", "a.bin", "uint16", "is empty"),
        (b"\x01\x00\x2c\x01", "a.bin", "uint16", "token 300 at place 1, and the voc"),
        (b"\x01\x00", "a.bin", None, "give one of uint16, uint32"),
        (b"\x01\x00", "a.bin", "int8", "Got int8"),
        (b"no numpy", "a.npy", None, "is no .npy file"),
        (np.zeros((2, 3), np.int32), "a.npy", None, "int32 of the shape (2, 3)"),
        (np.zeros(3), "a.npy", None, "It has float64"),
        (np.zeros(0, np.int32), "a.npy", None, "is empty"),
        (np.array([0, -1]), "a.npy", None, "token -1 at place 1"),
        (np.zeros(3, np.int32), "a.npy", "uint16", "leave dtype=uint16 out"),
        (np.array([None]), "a.npy", None, "is no .npy file"),
    ],
)
def test_a_file_without_tokens_is_told(tmp_path, content, name, dtype, words):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(DataError) as error:
        data.open_token_file(path, VOCAB, dtype)
    assert words in str(error.value) and str(path) in str(error.value)


def test_a_bad_token_is_found_behind_the_first_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_PIECE", 16)
    tokens = np.zeros(100, np.uint16)
    tokens[77] = VOCAB
    with pytest.raises(DataError, match="token 300 at place 77"):
        opened(tmp_path, tokens)
    tokens[77] = VOCAB - 1
    whole = opened(tmp_path, tokens)
    monkeypatch.undo()
    assert opened(tmp_path, tokens).digest == whole.digest
    tokens[5] = 1
    assert opened(tmp_path, tokens).digest != whole.digest


def test_sizes_that_make_no_batch_are_told(tmp_path):
    file = opened(tmp_path, np.zeros(10))
    with pytest.raises(DataError, match="has 10 tokens, which make no row of 11"):
        data.TokenWindows(file, 11)
    with pytest.raises(DataError, match="at least 2 tokens"):
        data.TokenWindows(file, 1)
    with pytest.raises(DataError, match="at least 1 row"):
        data.ShuffledBatches(data.TokenWindows(file, 5), 0)
    with pytest.raises(DataError, match="at least 1 row"):
        data.SyntheticTokens(5, 0, 4)
    assert len(data.TokenWindows(file, 10)) == 1
