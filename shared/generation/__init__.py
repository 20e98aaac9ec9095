"""From prompts to answers: prefill, decoding, sampling, and an engine over slots."""

from shared.generation.decoding import DecoderFunction, Step, decode, prefill
from shared.generation.engine import Engine, Request
from shared.generation.generate import Answer, Token, generate, stream
from shared.generation.prompts import Batch
from shared.generation.sampling import Sampled, Sampling, sample

__all__ = [
    "Answer",
    "Batch",
    "DecoderFunction",
    "Engine",
    "Request",
    "Sampled",
    "Sampling",
    "Step",
    "Token",
    "decode",
    "generate",
    "prefill",
    "sample",
    "stream",
]
