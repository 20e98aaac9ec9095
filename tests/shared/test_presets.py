"""Presets against what is published: sizes to the last parameter, and active ones."""

import pytest

import shared
from shared.presets import not_verified, preset, presets
from shared.trees import flatten

# What the repositories' safetensors files hold in all, and how much of it is not the
# text model. The latter was counted in the reference's own modules (transformers
# 5.24): vision and audio towers with what leads from them into the decoder, the layer
# of multi-token prediction, and keys and values that no layer uses.
PUBLISHED = {
    "qwen3.5-0.8b": (873_438_784, {"vision": 100_592_896, "draft": 20_452_864}),
    "qwen3.5-2b": (2_274_069_824, {"vision": 331_416_576, "draft": 60_828_160}),
    "qwen3.5-4b": (4_659_865_088, {"vision": 333_514_240, "draft": 120_599_552}),
    "qwen3.5-9b": (9_653_104_368, {"vision": 456_010_480, "draft": 243_290_624}),
    "qwen3.5-27b": (27_781_427_952, {"vision": 460_730_096, "draft": 424_699_392}),
    "qwen3.5-35b-a3b": (
        35_951_822_704,
        {"vision": 446_571_248, "draft": 844_640_768},
    ),
    "qwen3.5-122b-a10b": (
        125_086_497_008,
        {"vision": 451_290_864, "draft": 2_523_679_232},
    ),
    "qwen3.5-397b-a17b": (
        403_397_928_944,
        {"vision": 456_010_480, "draft": 6_595_568_128},
    ),
    "gemma-3-270m": (268_098_176, {}),
    "gemma-3-1b": (999_885_952, {}),
    "gemma-3-4b": (4_300_079_472, {"vision": 419_816_304}),
    "gemma-3-12b": (12_187_325_040, {"vision": 421_290_864}),
    "gemma-3-27b": (27_432_406_640, {"vision": 423_060_336}),
    "gemma-4-26b-a4b": (25_805_936_206, {"vision": 572_794_416}),
    "gemma-4-31b": (31_273_088_876, {"vision": 575_743_536}),
    "gemma-4-e2b": (
        5_123_178_051,
        {"vision": 168_544_256, "audio": 307_183_904, "unused keys": 18_880_512},
    ),
    "gemma-4-e4b": (
        7_996_156_490,
        {"vision": 169_330_688, "audio": 308_756_768, "unused keys": 55_055_616},
    ),
}

# What models are said to have, in billions, and half a unit of the last digit.
ROUNDED = {"deepseek-v3": (671, 0.5), "qwen3-next-80b-a3b": (80, 0.5)}
ACTIVE = {
    "qwen3-next-80b-a3b": (3.9, 0.05),
    "qwen3.5-35b-a3b": (3, 0.5),
    "qwen3.5-122b-a10b": (10, 0.5),
    "qwen3.5-397b-a17b": (17, 0.5),
    "gemma-4-26b-a4b": (3.8, 0.05),
    "deepseek-v3": (37, 1),
}


def count(name):
    return sum(leaf.size for _, leaf in flatten(shared.abstract_params(preset(name))))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_files(name):
    published, others = PUBLISHED[name]
    assert count(name) + sum(others.values()) == published


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_as_many_as_is_said(name):
    published, rounding = ROUNDED[name]
    assert abs(count(name) / 1e9 - published) <= rounding


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_as_many_as_the_name_says(name):
    published, rounding = ACTIVE[name]
    active = shared.active_parameters(preset(name)) / 1e9
    assert abs(active - published) <= rounding


def test_every_published_size_is_compared_with_what_is_published():
    published = {name for name in presets() if not name.endswith("-tiny")}
    assert published == PUBLISHED.keys() | ROUNDED.keys()


@pytest.mark.parametrize("name", presets())
def test_what_is_not_verified_is_a_field(name):
    config = preset(name)
    for path in not_verified(name):
        owner = config
        for field in path.split("."):
            assert hasattr(owner, field)
            owner = getattr(owner, field)


@pytest.mark.parametrize("name", presets())
def test_tiny_presets_are_tiny_and_others_not(name):
    assert (count(name) < 1e6) == name.endswith("-tiny")


def test_an_unknown_name_lists_those_there_are():
    for ask in (preset, not_verified):
        with pytest.raises(KeyError, match="No preset 'nobody'.*gemma-3-270m"):
            ask("nobody")
