"""Which API? What is measured is there, and is written so that it can be read back.

Measuring empties JAX's caches, so the command runs in a process of its own.
"""

import importlib.util
import io
import json
import math
import pathlib
import runpy
import subprocess
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import parity.__main__
import shared
from parity import decoders
from parity.comparison import dispatch, page, side_by_side
from parity.comparison.side_by_side import Row, SideBySide
from parity.comparison.source_lines import count_lines, package_lines
from shared.presets import qwen3_next_tiny

ROOT = pathlib.Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"
NETWORK = ("src", "href", "{http://www.w3.org/1999/xlink}href")


def command(*argv):
    done = subprocess.run(
        [sys.executable, "-m", "parity", "compare", *map(str, argv)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The tiny preset's forward pass: the table, and the files by name."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("compare")
    files = {name: folder / f"tiny.{name}" for name in ("json", "svg", "html")}
    table = command(
        "qwen3-next-tiny",
        *("--functions=forward", "--length=8", "--repeats=1", "--rounds=2"),
        *(f"--{name}={file}" for name, file in files.items()),
    )
    return table, {name: file.read_text("utf-8") for name, file in files.items()}


@pytest.fixture(scope="session")
def gradient(tmp_path_factory):
    """The gradient of a model that is a config and no weights."""
    folder = tmp_path_factory.mktemp("config")
    config = qwen3_next_tiny(1, dense_layers=(0,))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    file = folder / "result.json"
    command(
        folder,
        *("--abstract", "--functions=gradient", "--repeats=1", "--length=8"),
        f"--json={file}",
    )
    return json.loads(file.read_text("utf-8"))


def rows_of(result):
    return {(row["section"], row["quantity"]): row for row in result["rows"]}


PROGRAM = {"trace", "lower", "compile", "temporary memory", "arithmetic", "program"}


def test_every_quantity_of_both_frontends_is_a_positive_number(tiny):
    result = json.loads(tiny[1]["json"])
    rows = rows_of(result)
    assert {quantity for section, quantity in rows if section == "forward"} == PROGRAM
    assert ("dispatch", dispatch.USUAL) in rows
    assert ("dispatch", dispatch.FLAT) in rows
    for (section, quantity), row in rows.items():
        measured = [row[side] for side in ("linen", "nnx") if row[side] is not None]
        both = section == "forward" or quantity in (dispatch.USUAL, dispatch.FLAT)
        assert len(measured) == 2 if both else measured
        assert all(math.isfinite(value) and value > 0 for value in measured), row
        assert (row["plain"] is not None) == (section == "dispatch")


def test_the_json_says_what_was_measured_where(tiny):
    result = json.loads(tiny[1]["json"])
    specs = shared.abstract_params(shared.preset("qwen3-next-tiny"))
    leaves = jax.tree.leaves(specs)
    assert (result["schema"], result["version"]) == ("parity-zoo/side-by-side", 1)
    assert result["target"] == "qwen3-next-tiny"
    assert result["parameters"] == sum(leaf.size for leaf in leaves)
    assert result["leaves"] == len(leaves)
    assert (result["batch"], result["length"]) == (1, 8)
    assert {"jax", "flax", "python", "backend", "system"} <= set(result["machine"])


def test_one_model_is_one_program_with_the_same_arithmetic_and_memory(tiny, gradient):
    for result in (json.loads(tiny[1]["json"]), gradient):
        ((function, same),) = result["same_program"].items()
        assert same
        rows = rows_of(result)
        for quantity in ("arithmetic", "program", "temporary memory"):
            row = rows[function, quantity]
            assert row["linen"] == row["nnx"]


def test_without_weights_there_is_no_time_of_a_call(gradient):
    sections = {section for section, _ in rows_of(gradient)}
    assert sections == {"gradient", "code"}


def test_the_table_has_the_numbers_of_the_json(tiny):
    table, files = tiny
    for row in json.loads(files["json"])["rows"]:
        assert row["quantity"] in table
        assert all(text in table for text in page.values(Row(**row)))
    assert "linen" in table
    assert "nnx" in table
    assert jax.__version__ in table


def check_svg(root):
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    named = root.get("aria-labelledby").split()
    texts = {e.get("id"): e.text for e in root if e.get("id") in named}
    assert len(texts) == 2
    assert all(texts.values())
    drawn = {"".join(e.itertext()).strip() for e in root.iter(f"{SVG}text")}
    assert {"linen", "nnx"} <= drawn
    return drawn


def test_the_svg_names_both_frontends_and_shows_the_numbers(tiny):
    drawn = check_svg(ElementTree.fromstring(tiny[1]["svg"]))
    for row in json.loads(tiny[1]["json"])["rows"]:
        assert set(page.values(Row(**row))) - {"–"} <= drawn


def test_the_page_is_whole_and_holds_every_number(tiny):
    root = ElementTree.fromstring(tiny[1]["html"])
    (svg,) = root.iter(f"{SVG}svg")
    check_svg(svg)
    numbers, facts = root.iter("table")
    rows = [[cell.text for cell in row] for row in numbers.iter("tr")]
    result = json.loads(tiny[1]["json"])
    assert rows[1:] == [
        [row["section"], row["quantity"], *page.values(Row(**row)), row["unit"]]
        for row in result["rows"]
    ]
    stated = {name.text: text.text for name, text in facts.iter("tr")}
    assert stated == result["machine"]
    assert not list(root.iter("script"))
    links = [element.get(name, "") for element in root.iter() for name in NETWORK]
    assert not [link for link in links if link and not link.startswith("#")]


def test_a_hostile_name_cannot_break_the_pictures():
    pytest.importorskip("matplotlib")
    name = "a<b>&\"c'\x1b[2J\n"
    row = Row("dispatch", "<jit> & $x_1$", "µs", 1.0, None, 2.0)
    machine = {"system": "<none>"}
    result = SideBySide(name, 1, 1, 1, 1, (row,), {"forward": False}, machine)
    check_drawn = "".join(ElementTree.fromstring(page.render_svg(result)).itertext())
    assert "a<b>&\"c'" in check_drawn
    text = "".join(ElementTree.fromstring(page.render_html(result)).itertext())
    assert "<jit> & $x_1$" in text
    assert "a different program in each" in text


# Refusals.


def refused(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    status = parity.__main__.main(["compare", *map(str, argv)], console)
    assert status == 2, out.getvalue()
    return out.getvalue()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["target", "Got 0"]),
        (["a", "b"], ["target", "Got 2"]),
        (["qwen3-next-huge"], ["qwen3-next-huge", "qwen3-next-tiny"]),
        (["qwen3-next-80b-a3b"], ["GiB", "--abstract"]),
        (["qwen3-next-tiny", "--functions=backward"], ["backward", "gradient"]),
        (["qwen3-next-tiny", "--functions="], ["functions", "forward"]),
        (["qwen3-next-tiny", "--repeats=0"], ["repeats", "0"]),
        (["qwen3-next-tiny", "--json=no/where.json"], ["no/where.json", "folder"]),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_bad_arguments(argv, words):
    out = refused(*argv)
    for word in words:
        assert word in out, out


@pytest.mark.parametrize("kind", ["svg", "html"])
def test_plots_without_matplotlib_say_what_to_install(kind, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "matplotlib" else find(n)
    )
    file = tmp_path / "out"
    out = refused("qwen3-next-tiny", f"--{kind}={file}")
    assert "pip install 'parity-zoo[plots]'" in out
    assert not file.exists()


# Lines of code.

SAMPLE = '''"""A module.

Of two lines."""

# A comment.
import os  # counted


class A:
    """One line."""

    x = """not
    a docstring

    of four lines, one blank"""

    def f(self): "docstring"; return 1


async def é(): """docstring"""; return (
    2,  # counted

    # not counted
)


def g():
    """Only
    this."""
    "a statement of its own"
'''


def test_lines_of_code_are_those_that_hold_code():
    # import, class, three of x, f, é and its two more, g and its statement.
    assert count_lines(SAMPLE) == 1 + 1 + 3 + 1 + 3 + 2


@pytest.mark.parametrize("source", ["", "\n\n", "# only\n", '"""Only."""\n', "'a' 'b'"])
def test_nothing_but_words_is_no_code(source):
    assert count_lines(source) == 0


def test_every_file_of_a_package_is_counted():
    files = {f.name for f in (ROOT / "zoo_nnx").glob("*.py")}
    import zoo_nnx

    lines = package_lines(zoo_nnx)
    assert set(lines) == files
    assert all(lines.values())


# The time of a call.


def test_every_way_to_call_gives_the_same_bytes():
    config = qwen3_next_tiny(2, dense_layers=(0, 1)).replace(scan_layers=False)
    params = shared.init_params(jax.random.key(0), config)
    pair, tokens = decoders.make_pair(config, params), jnp.array([[3, 1]], jnp.int32)
    expected = np.asarray(params["embed_tokens"])[[3, 1]][None]
    makers = (
        dispatch.plain_ways,
        dispatch.linen_ways,
        dispatch.nnx_ways,
        dispatch.nnx_module_ways,
    )
    ways = [way for make in makers for way in make(pair, tokens)]
    assert {way.side for way in ways} == {"plain", "linen", "nnx"}
    for way in ways:
        np.testing.assert_array_equal(way.call(), expected)
        np.testing.assert_array_equal(way.call(), expected)


def test_leaves_flattened_once_give_what_the_tree_gives():
    tree = {"b": jnp.arange(3.0), "a": {"c": jnp.ones(3)}}
    function, leaves = dispatch.flatten_once(
        lambda t, x: t["b"] * x + t["a"]["c"], tree
    )
    doubled = [2 * leaf for leaf in leaves]
    assert function(leaves, 2.0).tolist() == [1, 3, 5]
    assert function(doubled, 2.0).tolist() == [2, 6, 10]


def test_the_sides_of_a_pair_take_turns():
    calls = []
    ways = [dispatch.Way("", name, lambda n=name: calls.append(n)) for name in "ab"]
    timing = dispatch.measure(*ways, rounds=2, calls=4)
    # Before each of three rounds, one of which is not counted, both are called once.
    assert "".join(calls) == "ab" + "baabbaab" + "ab" + "baabbaab" + "ab" + "baabbaab"
    for quartiles in timing:
        assert 0 < quartiles.low <= quartiles.median <= quartiles.high


def test_the_benchmark_is_of_about_50_and_500_leaves():
    layers = runpy.run_path(str(ROOT / "benchmarks" / "dispatch.py"))["LAYERS"]
    sizes = [
        len(jax.tree.leaves(shared.abstract_params(config)))
        for config in (qwen3_next_tiny(n).replace(scan_layers=False) for n in layers)
    ]
    np.testing.assert_allclose(sizes, [50, 500], rtol=0.1)


# The compilation cache.

CACHE_SCRIPT = """
import pathlib, sys
import jax, jax.numpy as jnp
from parity.comparison.side_by_side import no_compilation_cache

folder = pathlib.Path(sys.argv[1])
files = lambda: len(list(folder.iterdir())) if folder.exists() else 0
jax.jit(lambda x: x * 2)(jnp.ones(3))
before = files()
with no_compilation_cache():
    jax.jit(lambda x: x * 3)(jnp.ones(3))
    inside = files()
jax.jit(lambda x: x * 4)(jnp.ones(3))
print(before, inside, files())
"""


def test_compiling_is_timed_without_the_cache_which_goes_on_afterwards(tmp_path):
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{CACHE_SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            "PATH": "",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
    )
    assert done.returncode == 0, done.stderr
    before, inside, after = map(int, done.stdout.split())
    assert 0 < before == inside < after


def test_a_refused_function_is_named():
    with pytest.raises(ValueError, match="backward"):
        side_by_side.compare_target("qwen3-next-tiny", functions=["backward"])
