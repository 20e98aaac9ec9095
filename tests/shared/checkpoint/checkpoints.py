"""Checkpoints for the tests: made from the published table of names, by hand."""

import json
import math
import pathlib
import shutil

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

GOLDENS = pathlib.Path(__file__).resolve().parents[2] / "goldens"
NAMES = ("qwen3_next_8l", "qwen3_next_6l", "qwen3_next_dense_mix")
FAMILIES = (
    "qwen3_5_dense_8l",
    "qwen3_5_moe_6l",
    "qwen3_5_moe_8l",
    "qwen3_5_moe_vl_wrapper",
    "gemma3_text",
    "gemma4_dense",
    "gemma4_moe",
    "gemma4_ple_kvshare",
    "deepseek_v3",
)

# Every axis that can have length 3 has it, so that a wrong axis has the right shape:
# hidden size, vocabulary, widths, experts, heads, periods and layers of a run.
ALL_THREES = {
    "model_type": "qwen3_next",
    "vocab_size": 3,
    "hidden_size": 3,
    "intermediate_size": 3,
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 3,
    "partial_rotary_factor": 0.67,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 3,
    "shared_expert_intermediate_size": 3,
}


def tensor_shapes(c, fused_experts=False):
    """Names and shapes of a Qwen3-Next checkpoint with the config.json `c`."""
    d, experts, width = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    value = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    heads = c["num_attention_heads"] * c["head_dim"]
    kv_heads = c["num_key_value_heads"] * c["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], d)
    for i in range(c["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
        }
        if (i + 1) % c.get("full_attention_interval", 4):
            layer |= {
                "linear_attn.in_proj_qkvz.weight": (2 * key + 2 * value, d),
                "linear_attn.in_proj_ba.weight": (2 * c["linear_num_value_heads"], d),
                "linear_attn.conv1d.weight": (
                    2 * key + value,
                    1,
                    c["linear_conv_kernel_dim"],
                ),
                "linear_attn.A_log": (c["linear_num_value_heads"],),
                "linear_attn.dt_bias": (c["linear_num_value_heads"],),
                "linear_attn.norm.weight": (c["linear_value_head_dim"],),
                "linear_attn.out_proj.weight": (d, value),
            }
        else:
            layer |= {
                "self_attn.q_proj.weight": (2 * heads, d),
                "self_attn.k_proj.weight": (kv_heads, d),
                "self_attn.v_proj.weight": (kv_heads, d),
                "self_attn.o_proj.weight": (d, heads),
                "self_attn.q_norm.weight": (c["head_dim"],),
                "self_attn.k_norm.weight": (c["head_dim"],),
            }
            if c.get("attention_bias"):
                layer |= {
                    "self_attn.q_proj.bias": (2 * heads,),
                    "self_attn.k_proj.bias": (kv_heads,),
                    "self_attn.v_proj.bias": (kv_heads,),
                    "self_attn.o_proj.bias": (d,),
                }
        if i in c.get("mlp_only_layers", ()):
            layer |= _gated_mlp("mlp", c["intermediate_size"], d)
        else:
            layer |= {
                "mlp.gate.weight": (experts, d),
                "mlp.shared_expert_gate.weight": (1, d),
                **_gated_mlp(
                    "mlp.shared_expert", c["shared_expert_intermediate_size"], d
                ),
            }
            if fused_experts:
                layer["mlp.experts.gate_up_proj"] = (experts, 2 * width, d)
                layer["mlp.experts.down_proj"] = (experts, d, width)
            else:
                for e in range(experts):
                    layer |= _gated_mlp(f"mlp.experts.{e}", width, d)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _gated_mlp(above, width, d):
    return {
        f"{above}.gate_proj.weight": (width, d),
        f"{above}.up_proj.weight": (width, d),
        f"{above}.down_proj.weight": (d, width),
    }


def unique_tensors(shapes, dtype=np.float32):
    """Tensors in which no two elements of the whole checkpoint are equal."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        tensors[name] = np.arange(start, start + size).reshape(shape).astype(dtype)
        start += size
    return tensors


def write(folder, config, tensors):
    """Writes a checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: np.ascontiguousarray(t) for name, t in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    return folder


def copy_golden(name, folder):
    """A golden checkpoint that a test may damage."""
    folder.mkdir()
    for path in (GOLDENS / name).iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, folder)
    return folder


def read(folder):
    """All tensors of a folder, as the safetensors library reads them."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


def keys(name):
    """Names and shapes in a golden's keys.txt: those of its file, which come first."""
    text = (GOLDENS / name / "keys.txt").read_text()
    in_file, _, _ = text.partition("state_dict")
    pairs = [line.split("\t") for line in in_file.splitlines() if "\t" in line]
    return {key: tuple(json.loads(shape)) for key, shape in pairs}
