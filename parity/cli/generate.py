"""Continues prompts in one frontend, or in both with the proof that they agree.

parity generate TARGET --prompt=... [--frontend=nnx] [--compare] [flags]

TARGET is a folder with a Hugging Face checkpoint, or a preset (see `parity models`),
whose first values have learnt nothing. A prompt is token ids, as in --prompt="5 17 2",
or text, which needs the folder's tokenizer.json and `pip install 'parity-zoo[text]'`;
--prompt may be repeated. With --compare both frontends run, and each step is compared
to the bit: ids, log-probabilities, logits and every leaf of the caches.
Exit status 0: done, or proved; 1: the frontends differ; 2: bad input.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console
from absl import flags

import shared
import zoo_linen
import zoo_nnx
from parity import decoders, decoding, zoo
from parity.cli import UsageError, check_files
from parity.reporting.report import Report, Tier
from parity.reporting.text import json_number, printable
from parity.trees import Comparison
from shared import generation
from shared.generation.text import TextStream

FRONTENDS = ("linen", "nnx")
_IDS = re.compile(r"\s*[+-]?\d+(?:[\s,]+[+-]?\d+)*\s*")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    flags.DEFINE_multi_string(
        "prompt", [], "Token ids, or text; may be repeated.", flag_values=values
    )
    flags.DEFINE_bool(
        "text",
        False,
        "Whether prompts of numbers are text, too.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "frontend", "linen", FRONTENDS, "Which one runs.", flag_values=values
    )
    flags.DEFINE_bool(
        "compare", False, "Run both and compare every step.", flag_values=values
    )
    flags.DEFINE_list(
        "stop",
        None,
        "Ids that end an answer, and stand in it. Default: the checkpoint's.",
        flag_values=values,
    )
    for name, default, low, text in (
        ("max_new_tokens", 32, None, "At most so many tokens an answer."),
        ("top_k", 0, None, "Keep the k most probable tokens; 0: all."),
        ("seed", 0, None, "Of drawn tokens, and of a preset's first values."),
        ("max_length", None, 1, "Positions of the cache. Default: what is needed."),
        ("chunk_size", None, 1, "Read prompts in chunks of so many tokens."),
        ("scan_period", None, 1, "Layers in a period; by default it is found."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=low, flag_values=values)
    for name, value, text in (
        ("temperature", 0.0, "Of the softmax that tokens are drawn from; 0: greedy."),
        ("top_p", 1.0, "Keep the most probable tokens that sum to p; 1: all."),
        ("min_p", 0.0, "Keep tokens at least so probable, relative to the best."),
        ("repetition_penalty", 1.0, "Of tokens that were there before; 1: none."),
    ):
        flags.DEFINE_float(name, value, text, flag_values=values)
    flags.DEFINE_bool(
        "scan_layers",
        True,
        "Whether layers are stacked and scanned.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "json", None, "Write answers, and the report, there.", flag_values=values
    )


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Continues the prompts of one command."""
    if len(arguments) != 1:
        raise UsageError(
            f"Give one target, a preset or a folder. Got {len(arguments)}."
        )
    check_files(options, ["json"])
    target = arguments[0]
    layout = {name: options[name] for name in ("scan_layers", "scan_period")}
    config, folder = zoo.resolve(target, layout)
    tokenizer = _Tokenizer(target, folder)
    prompts = [_ids_of(text, tokenizer, options["text"]) for text in options["prompt"]]
    batch = _batch(config, prompts, options)
    params = _params(target, config, folder, layout, options["seed"])

    names = [options["frontend"]]
    if options["compare"]:
        names += [name for name in FRONTENDS if name not in names]
    sides = [_side(name, config, params) for name in names]
    tokens, compared, steps = [], Comparison(), 0
    streams = [tokenizer.stream(prompt) for prompt in prompts]
    printer, clock = _Printer(console, streams), _Clock()
    for new, step in _steps(sides, params, batch, options["chunk_size"]):
        for token in new:
            clock.count(token.row)
            printer.push(token)
            tokens.append(token)
        compared, steps = compared + step, steps + 1
    print(clock.text(both=options["compare"]), file=sys.stderr)

    report = _report(target, compared, len(prompts)) if options["compare"] else None
    answers = [_answer(tokens, row) for row in range(len(prompts))]
    if options["json"]:
        data = _as_dict(target, options, prompts, answers, tokenizer, clock, report)
        text = json.dumps(data, indent=2, allow_nan=False) + "\n"
        pathlib.Path(options["json"]).write_text(text, encoding="utf-8")
    if report is None:
        return 0
    report.print(console)
    console.print(report.verdict, style="bold")
    return 0 if report.ok else 1


# Input.


class _Tokenizer:
    """The tokenizer of a folder, opened when it is needed."""

    def __init__(self, target: str, folder: pathlib.Path | None):
        self.target, self.folder = target, folder
        self._opened: Any = None

    @property
    def is_used(self) -> bool:
        """Whether a prompt was text."""
        return self._opened is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a text.

        Raises:
          UsageError: there is no tokenizer, or no library for it.
        """
        if self._opened is None:
            self._opened = self._open(text)
        return list(self._opened.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return str(self._opened.decode([int(token) for token in ids]))

    def stream(self, prompt: Sequence[int]) -> _Pieces:
        """What makes printable pieces of one answer's tokens."""
        if not self.is_used:
            return _Pieces(lambda token: f"{token} ", lambda: "")
        text = TextStream(self.decode, prompt)
        return _Pieces(text.push, text.close)

    def _open(self, text: str) -> Any:
        said = f"The prompt {printable(text)!r} is text, not token ids such as '5 17 2'"
        if self.folder is None:
            raise UsageError(f"{said}, and a preset has no tokenizer: give ids.")
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(
                f"{said}, and there is no tokenizer.json in {self.folder}: put the "
                "checkpoint's there, or give ids."
            )
        try:
            import tokenizers
        except ImportError as error:
            raise UsageError(
                f"{said}: it needs tokenizers, pip install 'parity-zoo[text]'."
            ) from error
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other class
            raise UsageError(f"{file} is no tokenizer: {error}") from error


def _ids_of(prompt: str, tokenizer: _Tokenizer, is_text: bool) -> list[int]:
    if not is_text and _IDS.fullmatch(prompt):
        return _integers(prompt)
    return tokenizer.encode(prompt)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"[+-]?\d+", text)]


def _batch(
    config: shared.DecoderConfig, prompts: Sequence[Any], options: Mapping[str, Any]
) -> generation.Batch:
    if not prompts:
        raise UsageError('Give a prompt: --prompt="5 17 2", once or more often.')
    stop = options["stop"]
    if stop is not None and not all(_IDS.fullmatch(text) for text in stop):
        raise UsageError(f"--stop takes token ids. Got {','.join(stop)}.")
    try:
        batch = generation.Batch.create(
            config,
            prompts,
            options["max_new_tokens"],
            stop_tokens=None if stop is None else [int(text) for text in stop],
            max_length=options["max_length"],
        )
        sampling = generation.Sampling.create(
            len(prompts), **{name: options[name] for name in _SAMPLING}
        )
        return dataclasses.replace(batch, sampling=sampling)
    except (ValueError, OverflowError) as error:
        raise UsageError(str(error)) from error


def _params(
    target: str,
    config: shared.DecoderConfig,
    folder: pathlib.Path | None,
    layout: Mapping[str, Any],
    seed: int,
) -> Mapping[str, Any]:
    if folder is not None:
        return zoo.load(folder, **layout)[1]
    size = zoo.parameter_bytes(config)
    if size > zoo.MOST_BYTES:
        raise UsageError(
            f"First values of {target} are {size / 2**30:.1f} GiB, more than the "
            f"{zoo.MOST_BYTES / 2**30:.0f} GiB that are made: give a folder with a "
            "checkpoint, or a smaller preset."
        )
    print(f"{target}: first values from seed {seed}, untrained", file=sys.stderr)
    return decoders.first_values(config, seed)


def _side(
    name: str, config: shared.DecoderConfig, params: Mapping[str, Any]
) -> generation.DecoderFunction:
    if name == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    return zoo_nnx.as_function(zoo_nnx.from_params(config, params))


# Running.


def _steps(
    sides: Sequence[generation.DecoderFunction],
    params: Mapping[str, Any],
    batch: generation.Batch,
    chunk_size: int | None,
) -> Iterator[tuple[list[generation.Token], Comparison]]:
    if len(sides) > 1:
        yield from decoding.stream_both(sides, params, batch, chunk_size=chunk_size)
        return
    stream = generation.stream(
        sides[0],
        params,
        batch.prompts,
        max_new_tokens=batch.limits,
        sampling=batch.sampling,
        stop_tokens=batch.stop_tokens,
        max_length=batch.max_length,
        chunk_size=chunk_size,
    )
    yield from (([token], Comparison()) for token in stream)


class _Clock:
    """Tokens per second, once everything is compiled."""

    def __init__(self) -> None:
        self.begun = self.started = self.now = time.perf_counter()
        self.total = self.counted = 0
        self.by_row: dict[int, int] = {}

    def count(self, row: int) -> None:
        """A token has come."""
        self.now, self.total = time.perf_counter(), self.total + 1
        self.by_row[row] = self.by_row.get(row, 0) + 1
        if self.by_row[row] <= 2:  # prefill and the first step were compiled for them
            self.started = self.now
        else:
            self.counted += 1

    @property
    def per_second(self) -> float | None:
        """None if there were too few tokens to tell."""
        if not self.counted or self.now <= self.started:
            return None
        return self.counted / (self.now - self.started)

    def text(self, *, both: bool) -> str:
        """The same for people."""
        whole = f"{self.total} tokens in {self.now - self.begun:.1f} s with compiling"
        if self.per_second is None:
            return f"{whole}; tokens per second: needs 3 tokens an answer"
        with_both = ", both frontends and their comparison" if both else ""
        return (
            f"{whole}; {self.per_second:.1f} tokens per second, counted from the third "
            f"of each answer on{with_both}"
        )


class _Pieces(NamedTuple):
    """Text of one answer as its tokens come."""

    push: Callable[[int], str]
    close: Callable[[], str]


class _Printer:
    """Shows answers one after the other; the one that is shown grows token by token."""

    def __init__(self, console: rich.console.Console, streams: Sequence[_Pieces]):
        self.console, self.streams = console, streams
        several = len(streams) > 1
        self.waiting = [f"{i}: " if several else "" for i in range(len(streams))]
        self.ended = [False] * len(streams)
        self.shown = 0

    def push(self, token: generation.Token) -> None:
        """Shows a token, now or when its answer's turn comes."""
        stream = self.streams[token.row]
        self.waiting[token.row] += stream.push(token.token)
        if token.reason is not None:
            self.waiting[token.row] += stream.close() + "\n"
            self.ended[token.row] = True
        while self.shown < len(self.streams):
            text, self.waiting[self.shown] = self.waiting[self.shown], ""
            # Not by `print`, which would wrap lines; and what a model says is not for
            # the terminal to act on.
            self.console.out(printable(text), end="", highlight=False)
            if not self.ended[self.shown]:
                break
            self.shown += 1
        self.console.file.flush()


# Output.


def _answer(tokens: Sequence[generation.Token], row: int) -> generation.Answer:
    own = [token for token in tokens if token.row == row]
    ids, log_probs = [t.token for t in own], [t.log_prob for t in own]
    return generation.Answer(ids, log_probs, own[-1].reason or "length")


def _report(target: str, compared: Comparison, rows: int) -> Report:
    note = "generation: ids, log-probabilities, logits, every cache leaf, to the bit"
    return Report(target, (Tier("decode", compared, rows, note),))


def _as_dict(
    target: str,
    options: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[generation.Answer],
    tokenizer: _Tokenizer,
    clock: _Clock,
    report: Report | None,
) -> dict[str, Any]:
    rows = []
    for given, ids, answer in zip(options["prompt"], prompts, answers, strict=True):
        row = {
            "prompt": list(ids),
            "tokens": answer.tokens,
            "log_probs": [json_number(value) for value in answer.log_probs],
            "reason": answer.reason,
        }
        if tokenizer.is_used:
            row |= {"prompt_text": given, "text": tokenizer.decode(answer.tokens)}
        rows.append(row)
    return {
        "schema": "parity-zoo/generation",
        "version": 1,
        "target": target,
        "frontend": options["frontend"],
        "answers": rows,
        "timing": {
            "tokens": clock.total,
            "seconds_with_compiling": clock.now - clock.begun,
            "tokens_per_second": clock.per_second,
            "counted": clock.counted,
        },
        "report": None if report is None else report.as_dict(),
    }
