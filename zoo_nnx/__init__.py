"""The zoo as pure Flax NNX modules, one file a layer, named as in `shared.layers`."""

from zoo_nnx import training
from zoo_nnx.decoder import Decoder
from zoo_nnx.decoder_layer import DecoderLayer
from zoo_nnx.function import DecoderFunction, as_function
from zoo_nnx.gated_delta_net import GatedDeltaNet
from zoo_nnx.grouped_query_attention import GroupedQueryAttention
from zoo_nnx.latent_attention import LatentAttention
from zoo_nnx.mlp import MLP
from zoo_nnx.optimizer import load_training_state, training_state
from zoo_nnx.sparse_moe import Experts, SparseMoE
from zoo_nnx.state import attach_adapters, from_params, to_params
from zoo_nnx.training import Optimizer, Trainer

__all__ = [
    "MLP",
    "Decoder",
    "DecoderFunction",
    "DecoderLayer",
    "Experts",
    "GatedDeltaNet",
    "GroupedQueryAttention",
    "LatentAttention",
    "Optimizer",
    "SparseMoE",
    "Trainer",
    "as_function",
    "attach_adapters",
    "from_params",
    "load_training_state",
    "to_params",
    "training",
    "training_state",
]
