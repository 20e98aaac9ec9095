"""On eight virtual devices a model gives what it gives on one."""

import numpy as np
import pytest

from tests.eight_devices import results_of
from tests.shared.training import eight_devices as script

# Sums of a few hundred products in another order, of numbers around one.
NOISE = 2e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of(script, tmp_path_factory.mktemp("mesh"))


def assert_near(ours, whole):
    assert ours.keys() == whole.keys()
    for name, leaf in ours.items():
        scale = max(np.abs(whole[name]).max(), 1e-3)
        np.testing.assert_allclose(
            leaf, whole[name], rtol=0, atol=NOISE * scale, err_msg=name
        )
        assert np.any(leaf), name


@pytest.mark.parametrize("mesh", script.EXPERTS)
def test_experts_on_a_mesh_are_the_experts(results, mesh):
    assert_near(results[f"experts/{mesh}"], results["experts/whole"])


@pytest.mark.parametrize("mesh", script.ATTENTION)
def test_a_kernel_on_a_mesh_is_attention(results, mesh):
    assert_near(results[f"attention/{mesh}"], results["attention/whole"])


@pytest.mark.parametrize("mesh", script.MODELS)
def test_a_model_on_a_mesh_has_the_gradients_of_one_device(results, mesh):
    assert_near(results[f"linen/{mesh}"], results["linen/whole"])


@pytest.mark.parametrize("mesh", script.MODELS)
def test_frontends_are_equal_to_the_bit_on_a_mesh(results, mesh):
    linen, nnx = (results[f"{frontend}/{mesh}"] for frontend in ("linen", "nnx"))
    assert linen.keys() == nnx.keys()
    for name, leaf in linen.items():
        np.testing.assert_array_equal(leaf, nnx[name], err_msg=name)


def test_tokens_of_padding_cost_no_expert_anything(results):
    padding = script.SEGMENTS == 0
    for mesh in script.EXPERTS:
        assert not np.any(results[f"experts/{mesh}"]["y"][padding]), mesh
        assert not np.any(results[f"experts/{mesh}"]["x"][padding]), mesh


def test_a_run_on_a_mesh_is_the_run_and_resumes_to_the_bit(results):
    whole = results["training/whole"]
    linen, nnx = (results[f"training/{frontend}"] for frontend in ("linen", "nnx"))
    for name in ("losses", "lm_head"):
        np.testing.assert_array_equal(linen[name], nnx[name])
    assert_near({"losses": linen["losses"]}, {"losses": whole["losses"]})
    # AdamW's first steps are of the learning rate's size, whatever a gradient's.
    np.testing.assert_allclose(linen["lm_head"], whole["lm_head"], rtol=0, atol=1e-5)
    for run in (whole, linen, nnx):
        *_, third, again = run["losses"]
        assert third == again != run["losses"][0]
