"""Every published size, without a number of its weights.

`published/sizes.json` has the names and shapes of all tensors of each size, as the
reference's class makes them on torch's meta device from the config.json that `to_hf`
writes: routed experts fused, one entry for the layers that have a tensor of one shape.
"""

import collections
import itertools
import json
import math
import pathlib
import re

import pytest

import shared
from parity import decoders
from shared.checkpoint import hf_names
from shared.trees import flatten

REFERENCE = json.loads(
    (pathlib.Path(__file__).parent / "published" / "sizes.json").read_text()
)
SIZES = tuple(REFERENCE["models"])


def test_every_preset_that_is_not_tiny_is_here():
    assert set(SIZES) == {n for n in shared.presets() if not n.endswith("-tiny")}


def stretches(layers):
    """Sorted numbers as text: 0-2,4."""
    parts = []
    for _, part in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in part]
        same = numbers[0] == numbers[-1]
        parts.append(str(numbers[0]) if same else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)


@pytest.mark.parametrize("name", SIZES)
def test_names_shapes_and_count_are_those_of_the_references_class(name):
    config = shared.preset(name)
    tensors = hf_names.tensors(config, lambda tensor: True)
    layers = collections.defaultdict(list)
    for tensor in tensors:
        pattern = re.sub(r"^(model\.layers\.)\d+\.", r"\1*.", tensor.name)
        key = f"{pattern} {'x'.join(map(str, tensor.shape))}"
        layers[key] += [] if tensor.layer is None else [tensor.layer]
    expected = REFERENCE["models"][name]
    assert {k: stretches(sorted(v)) for k, v in layers.items()} == expected["tensors"]
    leaves = flatten(shared.abstract_params(config))
    assert sum(leaf.size for _, leaf in leaves) == expected["total"]
    assert sum(math.prod(tensor.shape) for tensor in tensors) == expected["total"]


@pytest.mark.parametrize("name", SIZES)
def test_both_frontends_have_its_tree(name):
    tier = decoders.check_tree(decoders.abstract_pair(shared.preset(name)))
    assert tier.status == "proved", tier.compared.differences
    assert tier.compared.elements == REFERENCE["models"][name]["total"]
