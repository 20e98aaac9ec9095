"""Names of a family's tensors, as a table of rows; those that several families share.

A row says what a tensor is called, which leaf of our tree it is, and how the two are
oriented. V vocabulary, D model width, E experts, F feed-forward width, W convolution
width, C convolution channels, P width of a layer's input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from shared.checkpoint.scheme import (
    AS_IS,
    CONVOLUTION,
    TRANSPOSED,
    Layout,
    Shape,
)

# What the names of the decoder begin with, and that of the head, which stands outside
# of it: of a text model, of a multimodal one, and of a multimodal one as it was written
# before transformers 4.52.
PREFIXES = {
    "model.": "",
    "model.language_model.": "",
    "language_model.model.": "language_model.",
}
PREFIX = "model."


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor, or one for each layer and expert.

    Attributes:
      tensor: its name, with {layer} and {expert} where it has them; without a prefix.
      leaves: paths in the tree of a layer, or of the model for a tensor without
        {layer}. Several stand one after the other in the tensor's last axis but one.
      layout: the orientation.
      sizes: the fields of config.json that its shape follows from.
      outside: whether it stands outside the decoder, as the head does.
    """

    tensor: str
    leaves: tuple[str, ...]
    layout: Layout
    sizes: str
    outside: bool = False

    def name(
        self,
        layer: int | None = None,
        expert: int | None = None,
        prefix: str = PREFIX,
    ) -> str:
        """Name of the tensor of a layer and expert."""
        beginning = PREFIXES[prefix] if self.outside else prefix
        return beginning + self.tensor.format(layer=layer, expert=expert)

    def part_shapes(self, leaf_shapes: Mapping[str, Shape]) -> list[Shape]:
        """Shapes in the tensor of its leaves, whose own are `leaf_shapes`."""
        own = [leaf_shapes[leaf] for leaf in self.leaves]
        if "{expert}" in self.tensor:
            own = [shape[1:] for shape in own]
        return [self.layout.tensor_shape(shape) for shape in own]


@dataclasses.dataclass(frozen=True)
class NameTable:
    """The tensors of a family of models.

    Attributes:
      rows: all but the routed experts.
      experts: the routed experts, one tensor each; empty: they are always fused.
      fused_experts: the routed experts, all of a layer in one tensor.
      ignored: beginnings of names of tensors that are no part of the decoder, with
        the reason; they are counted and reported, never read.
      ignored_layers: the same for whole layers behind the decoder's, by the end of a
        name that only they have.
      kinds: the fields of config.json that say which layers are of which kind.
    """

    rows: tuple[Row, ...]
    experts: tuple[Row, ...] = ()
    fused_experts: tuple[Row, ...] = ()
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored_layers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kinds: str = "layer_types"

    def layer_of(self, name: str) -> int | None:
        """The layer in a tensor's name, if it has one."""
        for prefix in PREFIXES:
            beginning = f"{prefix}layers."
            number = name.removeprefix(beginning).partition(".")[0]
            if name.startswith(beginning) and number.isdigit():
                return int(number)
        return None


def row(tensor: str, leaf: str, layout: Layout, sizes: str) -> Row:
    """A row of one leaf."""
    return Row(tensor, (leaf,), layout, sizes)


def linear(
    module: str, sizes: str, projections: Iterable[str], leaf: str | None = None
) -> tuple[Row, ...]:
    """Weights of linear projections of a layer, [out, in] in the tensor.

    Args:
      module: above them, as the tensor has it; "": none.
      sizes: the fields of config.json that their shapes follow from.
      projections: their names.
      leaf: the module as our tree has it, where it is not the same.
    """
    above = f"layers.{{layer}}.{module}."
    ours = module.replace(".", "/") if leaf is None else leaf
    return tuple(
        row(f"{above}{p}.weight", f"{ours}/{p}", TRANSPOSED, sizes) for p in projections
    )


def norms(module: str, sizes: str, names: Iterable[str]) -> tuple[Row, ...]:
    """Weights of norms of a layer, in `module`; "": directly in the layer."""
    above = f"layers.{{layer}}.{module}." if module else "layers.{layer}."
    ours = f"{module}/" if module else ""
    return tuple(row(f"{above}{n}.weight", f"{ours}{n}", AS_IS, sizes) for n in names)


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EMBEDDING = row("embed_tokens.weight", "embed_tokens", AS_IS, "vocab_size, hidden_size")
HEAD = dataclasses.replace(
    row("lm_head.weight", "lm_head", TRANSPOSED, "vocab_size, hidden_size"),
    outside=True,
)
OUTER = (EMBEDDING, row("norm.weight", "norm", AS_IS, "hidden_size"), HEAD)
TWO_NORMS = norms("", "hidden_size", ("input_layernorm", "post_attention_layernorm"))
FOUR_NORMS = (
    *TWO_NORMS,
    *norms(
        "", "hidden_size", ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    ),
)


def attention(sizes: str, norm_sizes: str = "head_dim") -> tuple[Row, ...]:
    """Grouped-query attention; where it is gated, query and gate are one per head."""
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    return (
        *linear("self_attn", sizes, projections),
        *biases("self_attn", sizes, projections),
        *norms("self_attn", norm_sizes, ("q_norm", "k_norm")),
    )


def biases(module: str, sizes: str, projections: Iterable[str]) -> tuple[Row, ...]:
    """Biases of linear projections of a layer."""
    return tuple(
        row(f"layers.{{layer}}.{module}.{p}.bias", f"{module}/{p}_bias", AS_IS, sizes)
        for p in projections
    )


def delta_net(projections: Iterable[str]) -> tuple[Row, ...]:
    """A gated delta net with these projections of its input."""
    sizes = (
        "linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, "
        "linear_value_head_dim, hidden_size"
    )
    above = "layers.{layer}.linear_attn."
    heads = "linear_num_value_heads"
    return (
        *linear("linear_attn", sizes, (*projections, "out_proj")),
        row(
            f"{above}conv1d.weight",
            "linear_attn/conv1d",
            CONVOLUTION,
            f"{sizes}, linear_conv_kernel_dim",
        ),
        row(f"{above}A_log", "linear_attn/A_log", AS_IS, heads),
        row(f"{above}dt_bias", "linear_attn/dt_bias", AS_IS, heads),
        *norms("linear_attn", "linear_value_head_dim", ("norm",)),
    )


DENSE = linear("mlp", "intermediate_size, hidden_size", PROJECTIONS)


def each_expert(sizes: str) -> tuple[Row, ...]:
    """A tensor for each expert: [F, D], [F, D] and [D, F]."""
    return tuple(
        row(
            f"layers.{{layer}}.mlp.experts.{{expert}}.{p}.weight",
            f"mlp/experts/{p}",
            TRANSPOSED,
            sizes,
        )
        for p in PROJECTIONS
    )


def fused_experts(module: str, sizes: str, leaf: str) -> tuple[Row, ...]:
    """All experts of a layer in one tensor: [E, 2F, D], gate before up, and [E, D, F].

    They are parameters, so without ".weight".
    """
    above = f"layers.{{layer}}.{module}."
    return (
        Row(
            f"{above}gate_up_proj",
            (f"{leaf}/gate_proj", f"{leaf}/up_proj"),
            TRANSPOSED,
            sizes,
        ),
        row(f"{above}down_proj", f"{leaf}/down_proj", TRANSPOSED, sizes),
    )
