"""Hugging Face's side of train.py: answers each line of its input with two numbers.

python benchmarks/train_hf.py FOLDER eager|sdpa; needs torch and transformers, not this
project. A line is "step BATCH LENGTH", answered by CPU and wall seconds of a step of
AdamW with clipped gradients, or "loss BATCH LENGTH", answered by the loss and 0.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
import transformers

STEPS = 3


def main() -> None:
    folder, attention = sys.argv[1:]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    ).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    sys.stdout.flush()
    for line in sys.stdin:
        what, *numbers = line.split()
        batch, length = map(int, numbers)
        print(*MEASURES[what](model, optimizer, _tokens(model, batch, length)))
        sys.stdout.flush()


def step(model, optimizer, tokens) -> tuple[float, float]:
    start = time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    ends = time.process_time(), time.perf_counter()
    return tuple((end - begin) / STEPS for end, begin in zip(ends, start, strict=True))


@torch.no_grad()
def loss(model, optimizer, tokens) -> tuple[float, float]:
    del optimizer
    return float(model(input_ids=tokens, labels=tokens, use_cache=False).loss), 0.0


def _tokens(model, batch: int, length: int):
    """The same numbers as in train.py."""
    shape = batch, length
    vocabulary = model.config.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, shape, np.int32)
    return torch.from_numpy(ids.astype(np.int64))


MEASURES = {"step": step, "loss": loss}

if __name__ == "__main__":
    main()
