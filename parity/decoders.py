"""The zoo's decoder in both frontends, side by side: trees, values, programs, bits.

Both are jitted the same way, as functions of a plain nested dict of arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st
from jaxtyping import Array

import shared
import zoo_linen
import zoo_nnx
from parity import strategies
from parity.pairs import search
from parity.programs import tier as program_tier
from parity.reporting.report import Tier
from parity.trees import Comparison, abstract, compare_bytes, compare_structure
from shared import generation
from shared.trees import Path, flatten

Apply = Callable[..., shared.DecoderOutput]

ROWS, LENGTH = 2, 17  # of an example
PROMPT, STEPS = 12, 4  # tokens that are read at most, then decoded; within LENGTH


class Example(NamedTuple):
    """One input: all arrays [B, T] int32."""

    tokens: Any
    labels: Any
    segment_ids: Any


class Prompt(NamedTuple):
    """What is read before decoding: tokens [B, T] padded on the right, lengths [B]."""

    tokens: Any
    lengths: Any


class Moment(NamedTuple):
    """What a call with a cache gives.

    Attributes:
      logits: [B, V] after each row's last token.
      ids: [B], their arg-max.
      cache: continued.
    """

    logits: Any
    ids: Any
    cache: Any


class Pair(NamedTuple):
    """One model, twice.

    Attributes:
      config: of both.
      linen: the Linen module.
      params: its parameters, arrays or abstract.
      nnx: the NNX module, which holds its own.
    """

    config: shared.DecoderConfig
    linen: zoo_linen.Decoder
    params: Mapping[str, Any]
    nnx: nnx.Module


def make_pair(config: shared.DecoderConfig, params: Mapping[str, Any]) -> Pair:
    """Both frontends over the same arrays."""
    model = zoo_nnx.from_params(config, params)
    return Pair(config, zoo_linen.Decoder(config), params, model)


def abstract_pair(config: shared.DecoderConfig) -> Pair:
    """Both frontends as each declares itself, without any array."""
    linen = zoo_linen.Decoder(config)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    variables = jax.eval_shape(linen.init, jax.random.key(0), tokens)
    return Pair(config, linen, variables["params"], abstract_nnx(config))


def abstract_nnx(config: shared.DecoderConfig) -> nnx.Module:
    """The NNX decoder as it declares itself, without any array."""
    build = lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))
    model: nnx.Module = nnx.eval_shape(build, graph_updates=False)  # on a mesh, too
    return model


def check_tree(pair: Pair) -> Tier:
    """Paths, shapes, dtypes and axis names; against the specs as a third witness."""
    linen_axes = dict(flatten(pair.linen.logical_axes()))
    nnx_params, nnx_axes = _nnx_leaves(pair.nnx)
    between = compare_structure(
        pair.params, nnx_params, axes=(_named(linen_axes), _named(nnx_axes))
    )
    specs = shared.abstract_params(pair.config)
    witness = compare_structure(pair.params, specs, names=("linen", "specs"))
    known = {d.path for d in between.differences}
    new = tuple(
        d for d in witness.differences if d.path not in known and d.what != "dtype"
    )
    compared = Comparison(between.leaves, between.elements, between.differences + new)
    return Tier("tree", compared, note="paths, shapes, dtypes, axis names")


class Side:
    """One frontend as functions of plain trees, made once: each is traced once.

    Attributes:
      apply: the decoder as a function of its parameters.
      forward: what it gives for an `Example`.
      gradient: outputs, losses and every gradient; see `objective_and_gradient`.
      prefill: reads a `Prompt` into a cache.
      decode: reads one token a row.
      run: `gradient`, jitted.
      read: `prefill`, jitted.
      step: `decode`, jitted.
    """

    def __init__(self, apply: generation.DecoderFunction):
        self.apply = apply
        self.forward = _forward(apply)
        self.gradient = objective_and_gradient(apply.config, apply)
        self.prefill, self.decode = _prefill(apply), _decode(apply)
        self.run = jitted(self.gradient)
        # These run a few times: compiling is what takes their time.
        self.read = jitted(self.prefill, quick_options())
        self.step = jitted(self.decode, quick_options())


Sides = tuple[Side, Side]


def make_sides(pair: Pair) -> Sides:
    """Linen's side and NNX's."""
    linen, other = zoo_linen.as_function(pair.linen), zoo_nnx.as_function(pair.nnx)
    return Side(linen), Side(other)


def both(function: Callable[[Any], Any], sides: Sequence[Any]) -> list[Any]:
    """Linen's result and NNX's, made side by side: compiling takes most of the time."""
    with futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, sides))


def first_values(config: shared.DecoderConfig, seed: int) -> Mapping[str, Any]:
    """Linen's parameters from a seed."""
    linen, tokens = zoo_linen.Decoder(config), jnp.zeros((1, 2), jnp.int32)
    # Under jit the forward pass of Linen's init is dead code.
    init = jax.jit(linen.init, compiler_options=quick_options())
    params: Mapping[str, Any] = init(jax.random.key(seed), tokens)["params"]
    return params


def _nnx_first_values(config: shared.DecoderConfig, seed: int) -> Mapping[str, Any]:
    build = jax.jit(
        lambda key: zoo_nnx.to_params(
            zoo_nnx.Decoder(config, rngs=nnx.Rngs(params=key))
        ),
        compiler_options=quick_options(),
    )
    params: Mapping[str, Any] = build(jax.random.key(seed))
    return params


def check_init(config: shared.DecoderConfig, seed: int) -> Tier:
    """First values from one seed, made by each frontend's own way."""
    return check_init_of(config, seed)[0]


def check_init_of(
    config: shared.DecoderConfig, seed: int
) -> tuple[Tier, Mapping[str, Any]]:
    """As `check_init`; with the tier come Linen's first values."""
    ways = first_values, _nnx_first_values
    params, others = both(lambda way: way(config, seed), ways)
    compared = compare_bytes(params, others, finite=True)
    note = f"first values from seed {seed}, to the bit"
    return Tier("init", compared, note=note), params


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Examples that Hypothesis draws.

    Attributes:
      seed: of the draws.
      count: of examples.
      replay: the command that draws them again.
    """

    seed: int
    count: int
    replay: str


def quick_options() -> dict[str, Any] | None:
    """For code that runs once, on the CPU: compiling is what takes its time."""
    if jax.default_backend() != "cpu":
        return None
    return {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }


def check_bits(
    pair: Pair, examples: Iterable[Example] | Drawn, sides: Sides | None = None
) -> Tier:
    """Weights held, then outputs, losses and every gradient with Linen's weights.

    Each frontend runs the last example twice: bits say something of the next run only
    where a frontend repeats its own.

    Args:
      pair: over arrays.
      examples: inputs.
      sides: of the pair, if they are there already.
    """
    held = compare_bytes(pair.params, zoo_nnx.to_params(pair.nnx), finite=True)
    if not fits(held):
        return Tier("bits", held, note="weights; Linen's do not fit into NNX")
    sides = sides or make_sides(pair)

    def compare(example: Example) -> Comparison:
        results = both(lambda side: side.run(pair.params, example), sides)
        return compare_bytes(*results, finite=True)

    compared, count, last, details = _over(pair, examples, compare)
    repeated = [
        compare_bytes(side.run(pair.params, last), side.run(pair.params, last))
        for side in sides
    ]
    return Tier(
        "bits",
        held + compared,
        count,
        "weights; logits, losses, every gradient under jit, to the bit",
        details=details,
        deterministic=not any(again.differences for again in repeated),
    )


def _over(
    pair: Pair,
    examples: Iterable[Example] | Drawn,
    compare: Callable[[Example], Comparison],
) -> tuple[Comparison, int, Example, tuple[str, ...]]:
    """All examples compared: how many, the last of them, and what to show."""
    if not isinstance(examples, Drawn):
        inputs = list(examples)
        compared = sum(map(compare, inputs), Comparison())
        return compared, len(inputs), inputs[-1], ()
    found = search.search(
        example_strategy(pair.config),
        compare,
        seed=examples.seed,
        count=examples.count,
    )
    return found.compared, found.examples, found.last, found.lines(examples.replay)


def check_program(
    pair: Pair,
    platforms: Sequence[str | None] = (None,),
    sides: Sides | None = None,
) -> Tier:
    """The lowered programs of what decoders do; nothing is run.

    That is forward, loss with gradients, prefill, and a step of decoding.

    Args:
      pair: arrays or abstract.
      platforms: to lower for, such as "cpu" and "tpu"; None: this machine's.
      sides: of the pair, if they are there already.
    """
    linen, other = sides or make_sides(pair)
    shape = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    params, example = abstract(pair.params), Example(shape, shape, shape)
    prompt = Prompt(jax.ShapeDtypeStruct((ROWS, PROMPT), jnp.int32), rows)
    cache = jax.eval_shape(lambda: new_cache(pair.config))
    given = {
        "forward": (params, example),
        "gradient": (params, example),
        "prefill": (params, prompt, cache),
        "decode": (params, rows, cache),
    }
    with jax.default_matmul_precision("highest"):
        tiers = [
            program_tier.check_programs(
                {name: (getattr(linen, name), getattr(other, name))}, [args], platforms
            )
            for name, args in given.items()
        ]
    merged = program_tier.merged(tiers)
    if merged.note != program_tier.NOTE:  # the reason why there is no verdict
        return merged
    return dataclasses.replace(merged, note=f"{merged.note}; prefill, decode")


def _forward(apply: Apply) -> Callable[[Mapping[str, Any], Example], Any]:
    def forward(params: Mapping[str, Any], example: Example) -> Any:
        return apply(params, example.tokens, segment_ids=example.segment_ids)

    return forward


def _prefill(
    apply: generation.DecoderFunction,
) -> Callable[[Mapping[str, Any], Prompt, Any], Moment]:
    def prefill(params: Mapping[str, Any], prompt: Prompt, cache: Any) -> Moment:
        step = generation.prefill(
            apply, params, prompt.tokens, cache, lengths=prompt.lengths
        )
        return _moment(step)

    return prefill


def _decode(
    apply: generation.DecoderFunction,
) -> Callable[[Mapping[str, Any], Array, Any], Moment]:
    def decode(params: Mapping[str, Any], ids: Array, cache: Any) -> Moment:
        return _moment(generation.decode(apply, params, ids, cache))

    return decode


def _moment(step: generation.Step) -> Moment:
    return Moment(step.logits, jax.lax.argmax(step.logits, 1, np.int32), step.cache)


def new_cache(config: shared.DecoderConfig) -> Any:
    """An empty cache with room for a `Prompt` and the steps after it, and no more."""
    return shared.init_cache(config, ROWS, PROMPT + STEPS)


def fits(compared: Comparison) -> bool:
    """Whether the arrays of one tree have a place in the other."""
    return not any(d.what in ("missing", "shape") for d in compared.differences)


def measured(
    config: shared.DecoderConfig, apply: Apply
) -> Callable[[Mapping[str, Any], Example], dict[str, Any]]:
    """Outputs, losses and gradients of a frontend as one jitted function."""
    return jitted(objective_and_gradient(config, apply))


def jitted(
    function: Callable[..., Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The function compiled, with matrix products of the highest precision.

    Args:
      function: of trees of arrays.
      options: of the compiler.
    """
    # As the program tier lowers it, so that tracing and lowering are done once.
    run = jax.jit(function, keep_unused=True, compiler_options=options)

    def with_precision(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return run(*args)

    return with_precision


def objective_and_gradient(
    config: shared.DecoderConfig, apply: Apply
) -> Callable[[Mapping[str, Any], Example], dict[str, Any]]:
    """Outputs, losses and gradients as a function of parameters and an example.

    The result is a nested dict without empty entries, so that paths name what differs.
    """

    def objective(params: Mapping[str, Any], example: Example) -> tuple[Array, Any]:
        output = apply(params, example.tokens, segment_ids=example.segment_ids)
        loss = shared.decoder_loss(output, example.labels, config, example.segment_ids)
        return loss.total, (output, loss)

    def run(params: Mapping[str, Any], example: Example) -> dict[str, Any]:
        (_, (output, loss)), gradients = jax.value_and_grad(objective, has_aux=True)(
            params, example
        )
        results = {
            "logits": output.logits,
            "router_logits": output.router_logits,
            **{f"loss_{name}": value for name, value in loss._asdict().items()},
        }
        present = {name: x for name, x in results.items() if x is not None}
        return {**present, "gradient": gradients}

    return run


def example_strategy(
    config: shared.DecoderConfig, length: int = LENGTH
) -> st.SearchStrategy[Example]:
    """Two rows of tokens, some of which repeat, padded or packed in any way."""
    ids = strategies.tokens(config.vocab_size, ROWS, length)
    return st.builds(Example, ids, ids, strategies.segment_ids(ROWS, length))


def draw_examples(
    config: shared.DecoderConfig, seed: int, count: int = 2, length: int = LENGTH
) -> Iterable[Example]:
    """Random tokens: a plain batch first, then rows with padding and packed sequences.

    All have one shape, so that the second compiles nothing.
    """
    random = np.random.default_rng(seed)
    for i in range(count):
        tokens = random.integers(0, config.vocab_size, (ROWS, length), dtype=np.int32)
        segments = np.ones_like(tokens)
        if i:
            cut = 1 + random.integers(1, length - 3)
            segments[0, :cut], segments[0, cut:] = 1, 2
            segments[1, : random.integers(1, length - 2)] = 0
        labels = np.where(random.random(tokens.shape) < 0.1, -100, tokens)
        yield Example(tokens, labels.astype(np.int32), segments)


def _nnx_leaves(model: nnx.Module) -> tuple[dict[str, Any], dict[Path, Any]]:
    """Parameters as a nested dict of text keys, and their axis names by path."""
    state = nnx.state(model, nnx.Param)
    axes = {
        tuple(map(str, path)): variable.get_metadata().get("out_sharding")
        for path, variable in nnx.to_flat_state(state)
    }
    return _text_keys(nnx.to_pure_dict(state)), axes


def _named(axes: Mapping[Path, Any]) -> dict[Path, Any]:
    return {
        path: None if names is None else tuple(names) for path, names in axes.items()
    }


def _text_keys(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {str(name): _text_keys(node) for name, node in tree.items()}
