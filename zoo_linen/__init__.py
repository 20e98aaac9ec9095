"""The zoo as Flax Linen modules, one file a layer, named as in `shared.layers`."""

from zoo_linen import partitioning, training
from zoo_linen.decoder import Decoder
from zoo_linen.decoder_layer import DecoderLayer
from zoo_linen.function import DecoderFunction, as_function
from zoo_linen.gated_delta_net import GatedDeltaNet
from zoo_linen.grouped_query_attention import GroupedQueryAttention
from zoo_linen.latent_attention import LatentAttention
from zoo_linen.mlp import MLP
from zoo_linen.sparse_moe import Experts, SparseMoE
from zoo_linen.training import Trainer, TrainState

__all__ = [
    "MLP",
    "Decoder",
    "DecoderFunction",
    "DecoderLayer",
    "Experts",
    "GatedDeltaNet",
    "GroupedQueryAttention",
    "LatentAttention",
    "SparseMoE",
    "TrainState",
    "Trainer",
    "as_function",
    "partitioning",
    "training",
]
