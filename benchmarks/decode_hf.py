"""Hugging Face's side of decode.py: answers each line of its input with seconds.

python benchmarks/decode_hf.py THREADS; needs torch and transformers, not this project.
A line is "prefill BATCH" or "decode BATCH STEPS"; the answer is CPU and wall seconds.
"""

from __future__ import annotations

import pathlib
import sys
import time

import torch
import transformers

CONFIG = pathlib.Path(__file__).parent / "configs" / "qwen3_next_51m.json"
PROMPT = 512


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    sys.stdout.flush()
    with torch.no_grad():
        for line in sys.stdin:
            what, batch, *rest = line.split()
            cpu, wall = MEASURES[what](model, int(batch), *map(int, rest))
            print(cpu, wall, flush=True)


def prefill(model, batch: int) -> tuple[float, float]:
    ids = _prompt(model, batch)
    start = time.process_time(), time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return time.process_time() - start[0], time.perf_counter() - start[1]


def decode(model, batch: int, steps: int) -> tuple[float, float]:
    output = model(_prompt(model, batch), use_cache=True, logits_to_keep=1)
    token = output.logits[:, -1:].argmax(-1)
    start = time.process_time(), time.perf_counter()
    for _ in range(steps):
        output = model(token, cache=output.cache, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
    return time.process_time() - start[0], time.perf_counter() - start[1]


def _prompt(model, batch: int):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(
        1, model.config.vocab_size, (batch, PROMPT), generator=generator
    )


MEASURES = {"prefill": prefill, "decode": decode}

if __name__ == "__main__":
    main()
