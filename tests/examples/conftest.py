"""The examples are code of users, so they run under JAX's own defaults."""

import jax
import pytest


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
