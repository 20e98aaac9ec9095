"""What the models compute, and all that both frontends need without knowing Flax."""

from shared import checkpoint, lora
from shared.config import (
    AttentionConfig,
    ConfigError,
    DecoderConfig,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerInputConfig,
    LayerKind,
    LinearScaling,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    YarnScaling,
)
from shared.context import Context
from shared.layers.decoder import (
    DecoderOutput,
    HiddenStates,
    abstract_params,
    active_parameters,
    init_params,
    logical_axes,
    param_specs,
    relayout,
)
from shared.layers.decoder_cache import (
    cache_shardings,
    from_layer_list,
    init_cache,
    insert_row,
    reset_rows,
    to_layer_list,
)
from shared.params import ParamSpec
from shared.plan import LayerPlan, PlanError, make_plan
from shared.presets import not_verified, preset, presets
from shared.training import Loss, decoder_loss

__all__ = [
    "AttentionConfig",
    "ConfigError",
    "Context",
    "DecoderConfig",
    "DecoderOutput",
    "GatedDeltaNetConfig",
    "HiddenStates",
    "LatentAttentionConfig",
    "LayerInputConfig",
    "LayerKind",
    "LayerPlan",
    "LinearScaling",
    "Loss",
    "MLPConfig",
    "MoEConfig",
    "ParamSpec",
    "PlanError",
    "RopeConfig",
    "YarnScaling",
    "abstract_params",
    "active_parameters",
    "cache_shardings",
    "checkpoint",
    "decoder_loss",
    "from_layer_list",
    "init_cache",
    "init_params",
    "insert_row",
    "logical_axes",
    "lora",
    "make_plan",
    "not_verified",
    "param_specs",
    "preset",
    "presets",
    "relayout",
    "reset_rows",
    "to_layer_list",
]
