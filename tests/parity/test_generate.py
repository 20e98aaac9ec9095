"""`parity generate`: the reference's tokens, text as it comes, both frontends as proof.

Expected ids are the reference's own greedy generation (golden.npz, gen5).
"""

import importlib.util
import io
import json
import pathlib
import shutil
import sys

import jsonschema
import numpy as np
import pytest
import rich.console

import parity.__main__
import shared
import zoo_linen
import zoo_nnx
from parity import decoding
from parity.cli import generate
from parity.reporting.text import printable
from shared import generation
from shared.generation.text import TextStream
from tests.parity.reporting.test_report import SCHEMA

FOLDER = pathlib.Path(__file__).parent.parent / "goldens" / "qwen3_next_6l"
with np.load(FOLDER / "golden.npz") as _golden:
    PROMPTS = _golden["gen5/input_ids"].tolist()
    ANSWERS = _golden["gen5/tokens_full"].tolist()
# As many as the model has ids: one half ASCII, the other parts of longer characters.
BYTES = [*range(0x20, 0x50), *range(0x80, 0xA0), *range(0xE2, 0xF2)]
needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="needs tokenizers: pip install -e '.[text]'",
)


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=40)
    argv = ["generate", *(str(arg) for arg in argv)]
    return parity.__main__.main(argv, console), out.getvalue()


def words(ids):
    return " ".join(map(str, ids))


def refused(*argv):
    status, out = main(*argv)
    assert status == 2, out
    assert out.startswith("parity generate: ")
    return out


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The checkpoint with a byte-level tokenizer of 96 ids."""
    tokenizers = pytest.importorskip("tokenizers")
    place = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(FOLDER, place, ignore=shutil.ignore_patterns("*.npz"))
    # The letters that stand for bytes, in the order of the bytes.
    letters = byte_letters()
    vocab = {letters[byte]: i for i, byte in enumerate(BYTES)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def byte_letters():
    """GPT-2's letters for bytes: printable ones stand for themselves."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


# Good input.


# Every run has two rows, the same lengths and the same limit: one program serves all.
BOTH = [f"--prompt={words(prompt)}" for prompt in PROMPTS]
LIMIT = ["--max-new-tokens=12", "--stop=94,95"]
assert not {94, 95} & {token for answer in ANSWERS for token in answer}


def test_the_reference_s_tokens_row_by_row(tmp_path, capsys):
    file = tmp_path / "out.json"
    commas = f"--prompt={','.join(map(str, PROMPTS[1]))}"
    status, out = main(FOLDER, BOTH[0], commas, *LIMIT, f"--json={file}")
    assert status == 0
    assert out == "".join(
        f"{row}: {words(answer)} \n" for row, answer in enumerate(ANSWERS)
    )
    said = capsys.readouterr()
    assert said.out == ""
    assert "24 tokens" in said.err
    assert "tokens per second, counted from the third" in said.err
    data = json.loads(file.read_text())
    assert data["frontend"] == "linen"
    assert [row["prompt"] for row in data["answers"]] == PROMPTS
    assert [row["tokens"] for row in data["answers"]] == ANSWERS
    assert [row["reason"] for row in data["answers"]] == ["length"] * 2
    assert all(value <= 0 for row in data["answers"] for value in row["log_probs"])
    timing = data["timing"]
    assert (timing["tokens"], timing["counted"]) == (24, 20)
    assert timing["tokens_per_second"] > 0
    assert data["report"] is None


def test_both_frontends_are_proved_equal(tmp_path):
    file = tmp_path / "out.json"
    status, out = main(
        FOLDER, *BOTH, *LIMIT, "--compare", "--frontend=nnx", f"--json={file}"
    )
    assert status == 0, out
    assert out.rstrip().endswith("proved")
    data = json.loads(file.read_text())
    assert data["frontend"] == "nnx"
    assert [row["tokens"] for row in data["answers"]] == ANSWERS
    jsonschema.validate(data["report"], SCHEMA)
    (tier,) = data["report"]["tiers"]
    assert (tier["tier"], tier["status"], tier["examples"]) == ("decode", "proved", 2)


def test_a_step_that_differs_is_told(monkeypatch):
    go_on, calls = decoding._go_on, []

    def odd(model, *args):
        found, rows = go_on(model, *args)
        if isinstance(model, zoo_nnx.DecoderFunction):
            calls.append(model)
            found = found._replace(log_probs=found.log_probs - float(len(calls) == 3))
        return found, rows

    monkeypatch.setattr(decoding, "_go_on", odd)
    status, out = main(FOLDER, *BOTH, *LIMIT, "--compare")
    assert status == 1
    assert "decode: step_3/log_probs: value" in out
    assert "step_2" not in out
    assert "NOT EQUAL" in out


def test_settings_are_those_of_the_generator(tmp_path):
    file = tmp_path / "out.json"
    settings = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "seed": 5,
    }
    given = [f"--{name}={value}" for name, value in settings.items()]
    assert main(FOLDER, *BOTH, *LIMIT, *given, f"--json={file}")[0] == 0
    config, params = shared.checkpoint.load_hf(FOLDER)
    expected = generation.generate(
        zoo_linen.as_function(zoo_linen.Decoder(config)),
        params,
        PROMPTS,
        max_new_tokens=12,
        stop_tokens=[94, 95],
        sampling=generation.Sampling.create(2, **settings),
        steps_per_call=1,
    )
    answers = json.loads(file.read_text())["answers"]
    assert [answer["tokens"] for answer in answers] == [x.tokens for x in expected]
    assert [answer["tokens"] for answer in answers] != ANSWERS


def test_stop_tokens_end_an_answer(tmp_path):
    file = tmp_path / "out.json"
    stop = f"--stop={ANSWERS[0][3]},{ANSWERS[1][0]}"
    status, out = main(FOLDER, *BOTH, LIMIT[0], stop, f"--json={file}")
    assert status == 0
    assert out == f"0: {words(ANSWERS[0][:4])} \n1: {ANSWERS[1][0]} \n"
    answers = json.loads(file.read_text())["answers"]
    assert [answer["reason"] for answer in answers] == ["stop", "stop"]


@needs_tokenizers
def test_text_goes_in_and_comes_out_character_by_character(folder, tmp_path):
    file, prompts = tmp_path / "out.json", ["₂ 1", "12"]
    given = [f"--prompt={prompt}" for prompt in prompts]
    status, out = main(folder, *given, "--text", *LIMIT, f"--json={file}")
    assert status == 0, out
    answers = json.loads(file.read_text())["answers"]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert bytes(BYTES[i] for i in answer["prompt"]) == prompt.encode()
        assert answer["prompt_text"] == prompt
        assert answer["text"] == utf8(BYTES[i] for i in answer["tokens"])
    assert out == "".join(
        f"{row}: {printable(answer['text'])}\n" for row, answer in enumerate(answers)
    )


def test_numbers_are_ids_unless_they_are_said_to_be_text():
    class Characters:
        encode = staticmethod(lambda text: list(text.encode()))

    assert generate._ids_of(" 12, 3\t4 ", Characters, is_text=False) == [12, 3, 4]
    assert generate._ids_of("12", Characters, is_text=True) == [49, 50]
    assert generate._ids_of("12a", Characters, is_text=False) == [49, 50, 97]


# Text as it comes.


def utf8(ids):
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["naïve €5 🙂🙂 日本", "é", "plain"])
def test_a_character_comes_when_its_bytes_are_there(text):
    stream = TextStream(utf8)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.close() == text
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_of_no_character_are_told_in_the_end():
    stream = TextStream(utf8, prompt="é".encode())
    raw = b"a\xe2\x82"
    assert [stream.push(byte) for byte in raw] == ["a", "", ""]
    assert stream.close() == utf8(raw)[1:]
    assert stream.close() == ""


def test_a_character_that_begins_in_the_prompt_is_told():
    stream = TextStream(utf8, prompt=b"a\xc3")
    assert stream.push(0xA9) == "é"


def test_a_space_that_depends_on_the_token_before_is_kept():
    pieces = {1: "to", 2: " be"}
    # As sentencepiece decodes: the text does not begin with a space.
    decode = lambda ids: "".join(pieces[i] for i in ids).lstrip()
    stream = TextStream(decode, prompt=[1])
    assert stream.push(2) + stream.push(1) == " beto"


def test_what_a_model_says_does_not_reach_the_terminal_as_a_command():
    out = io.StringIO()
    pieces = generate._Pieces(lambda token: "\x1b[2J[red]:smile:", lambda: "")
    printer = generate._Printer(rich.console.Console(file=out), [pieces])
    printer.push(generation.Token(0, 1, 0.0, "length"))
    assert out.getvalue() == "\\x1b[2J[red]:smile:\n"


# Bad input.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["target", "Got 0"]),
        ([FOLDER], ["--prompt"]),
        (["nowhere", "--prompt=1"], ["nowhere", "qwen3-next-tiny"]),
        ([FOLDER, "--prompt=1", "--frontend=flax"], ["frontend", "linen", "nnx"]),
        ([FOLDER, "--prompt=1 96"], ["prompt 0", "96 at 1", "vocabulary of 96"]),
        ([FOLDER, "--prompt=1", "--prompt=-3"], ["prompt 1", "-3"]),
        ([FOLDER, "--prompt=99999999999999999999"], ["prompt 0"]),
        ([FOLDER, "--prompt="], ["tokenizer.json"]),
        ([FOLDER, "--prompt=hello"], ["hello", "tokenizer.json", str(FOLDER)]),
        (["qwen3-next-tiny", "--prompt=hi"], ["hi", "preset", "ids"]),
        ([FOLDER, "--prompt=1", "--stop=400"], ["stop_tokens", "400"]),
        ([FOLDER, "--prompt=1", "--stop=end"], ["--stop", "end"]),
        ([FOLDER, "--prompt=1", "--max_new_tokens=0"], ["max_new_tokens", "0"]),
        ([FOLDER, "--prompt=1 2 3", "--max_length=4"], ["max_length", "3", "32"]),
        ([FOLDER, "--prompt=1", "--temperature=-1"], ["temperature", "-1"]),
        ([FOLDER, "--prompt=1", "--top_p=0"], ["top_p", "0"]),
        ([FOLDER, "--prompt=1", "--min_p=2"], ["min_p", "2"]),
        ([FOLDER, "--prompt=1", "--top_k=-1"], ["top_k", "-1"]),
        ([FOLDER, "--prompt=1", "--repetition_penalty=0"], ["repetition_penalty"]),
        ([FOLDER, "--prompt=1", "--seed=-1"], ["seed", "-1"]),
        ([FOLDER, "--prompt=1", "--chunk_size=0"], ["chunk_size", "0"]),
        ([FOLDER, "--prompt=1", "--json=/nowhere/x"], ["--json", "no such folder"]),
        (["qwen3-next-80b-a3b", "--prompt=1"], ["GiB", "smaller preset"]),
    ],
    ids=lambda value: " ".join(map(str, value[1:])),
)
def test_bad_input_is_refused_in_words(argv, words, capsys):
    out = refused(*argv)
    for word in words:
        assert word in out, out
    assert capsys.readouterr().out == ""


def test_nothing_is_printed_to_stdout_when_input_is_bad(capsys):
    assert parity.__main__.main(["generate", str(FOLDER), "--prompt=96"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "vocabulary of 96" in said.err


@needs_tokenizers
def test_an_empty_text_and_a_broken_tokenizer(folder, tmp_path):
    assert "at least one token id" in refused(folder, "--prompt=")
    broken = pathlib.Path(shutil.copytree(folder, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{}")
    assert str(broken / "tokenizer.json") in refused(broken, "--prompt=hi")


@needs_tokenizers
def test_without_the_library_the_message_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'parity-zoo[text]'" in refused(folder, "--prompt=hi")
