"""What the public strategies promise of what they draw."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parity import strategies


@given(st.data(), st.integers(1, 20), st.integers(0, 4))
def test_cuts_leave_no_part_empty(data, length, most):
    cuts = data.draw(strategies.splits(length, most))
    parts = np.diff([0, *cuts, length])
    assert len(cuts) <= most
    assert parts.min() >= 1
    assert parts.sum() == length


@given(st.data(), st.integers(2, 9), st.integers(1, 12))
def test_tokens_are_of_the_vocabulary(data, vocab, length):
    drawn = data.draw(strategies.tokens(vocab, 2, length))
    assert (drawn.shape, drawn.dtype) == ((2, length), np.int32)
    assert 0 <= drawn.min() <= drawn.max() < vocab


@given(st.data(), st.integers(1, 12))
def test_each_row_has_a_real_token_and_sequences_in_order(data, length):
    segments = data.draw(strategies.segment_ids(3, length))
    assert (segments.shape, segments.dtype) == ((3, length), np.int32)
    for row in segments:
        real = row[row > 0]
        assert real.size
        assert (np.diff(real) >= 0).all()


@given(st.data(), st.floats(1.0, 1e6, width=32))
def test_floats_keep_to_their_limit(data, most):
    drawn = data.draw(strategies.floats(3, 2, most=most))
    assert (drawn.shape, drawn.dtype) == ((3, 2), np.float32)
    assert np.isfinite(drawn).all()
    assert np.abs(drawn).max() <= most
