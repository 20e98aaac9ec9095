"""The side-by-side comparison as pictures and as one page: SVG and HTML.

Needs matplotlib (the extra `plots`). Both are readable on a dark and a light screen, by
a screen reader, and without a network.
"""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from parity.comparison.side_by_side import Row, SideBySide
from parity.reporting.text import one_line

COLUMNS = ("linen", "nnx", "plain")
_TITLES = {
    "s": "Seconds to trace, lower and compile",
    "bytes": "Temporary memory, bytes",
    "FLOP": "Arithmetic operations, loops multiplied out",
    "operations": "Operations in the program",
    "µs": "Microseconds of a jitted call, beside the computation (log scale)",
    "lines": "Lines of code",
}
# Seen on black and on white; the hatches tell the sides apart without colour.
_BARS = {"linen": ("#3f7fbf", ""), "nnx": ("#d97a1a", "//"), "plain": ("#8a8a8a", "..")}
_INK = "#010203"  # a colour nobody else uses, until it becomes that of the page
_SVG = "http://www.w3.org/2000/svg"
_COLOURS = (
    "svg.comparison{color:#1b1b1b;background:#ffffff}"
    "@media (prefers-color-scheme:dark){"
    "svg.comparison{color:#ececec;background:#171717}}"
)
_PAGE_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;"
    "padding:0 1rem;color:#1b1b1b;background:#ffffff}"
    "svg.comparison{width:100%;height:auto}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "caption{text-align:left;font-weight:600;padding:.5rem 0}"
    "th,td{padding:.25rem .75rem;border-bottom:1px solid #888888;text-align:left}"
    "td.number{text-align:right;font-variant-numeric:tabular-nums}"
    "@media (prefers-color-scheme:dark){body{color:#ececec;background:#171717}}"
)


def require_matplotlib() -> None:
    """Says how to install matplotlib where it is not.

    Raises:
      ImportError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "SVG and HTML need matplotlib, which is not installed: "
            "pip install 'parity-zoo[plots]'"
        )


def render_svg(result: SideBySide) -> str:
    """The plots as one SVG, a group of bars for each unit."""
    text = _draw(result)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(text)
    for child in list(root):
        if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}title"):
            root.remove(child)
    root.set("class", "comparison")
    root.set("role", "img")
    root.set("aria-labelledby", "comparison-title comparison-description")
    for i, (tag, own) in enumerate(
        {
            "title": {"id": "comparison-title", "text": _title(result)},
            "desc": {"id": "comparison-description", "text": _description(result)},
            "style": {"text": _COLOURS},
        }.items()
    ):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}")
        element.text = own.pop("text")
        element.attrib.update(own)
        root.insert(i, element)
    svg = ElementTree.tostring(root, encoding="unicode")
    return svg.replace(_INK, "currentColor") + "\n"


def render_html(result: SideBySide) -> str:
    """One self-contained page: the plots, then every number as a table."""
    escape = html.escape
    facts = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td>{escape(text)}</td></tr>\n"
        for name, text in result.machine.items()
    )
    head = "".join(f"<th scope='col'>{name}</th>" for name in _header())
    body = "".join(
        f"<tr><td>{escape(row.section)}</td><th scope='row'>{escape(row.quantity)}</th>"
        + "".join(f"<td class='number'>{escape(value)}</td>" for value in values(row))
        + f"<td>{escape(row.unit)}</td></tr>\n"
        for row in result.rows
    )
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'/>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'/>\n"
        f"<title>{escape(_title(result))}</title>\n<style>{_PAGE_STYLE}</style>\n"
        f"</head>\n<body>\n<h1>{escape(_title(result))}</h1>\n"
        + "".join(f"<p>{escape(text)}</p>\n" for text in summary(result))
        + render_svg(result)
        + f"<table>\n<caption>Every number measured</caption>\n<thead><tr>{head}</tr>"
        f"</thead>\n<tbody>\n{body}</tbody>\n</table>\n"
        f"<table>\n<caption>Machine and versions</caption>\n<tbody>\n{facts}</tbody>\n"
        "</table>\n</body>\n</html>\n"
    )


def summary(result: SideBySide) -> list[str]:
    """What the numbers are, in sentences."""
    model = (
        f"{one_line(result.target)}: {result.parameters:,} parameters in "
        f"{result.leaves} arrays, tokens of shape [{result.batch}, {result.length}]."
    )
    programs = [
        f"The {name} lowers to "
        + ("the same program in both." if same else "a different program in each.")
        for name, same in result.same_program.items()
    ]
    return [
        model,
        " ".join(programs),
        "Times are of this machine and moment, compiling without a cache; plain is a "
        "jitted function without Flax over a flat list of the same arrays.",
    ]


def values(row: Row) -> list[str]:
    """The numbers of a row as text: linen, nnx, plain."""
    return [_number(value, row.unit) for value in (row.linen, row.nnx, row.plain)]


def _draw(result: SideBySide) -> str:
    """The plots as matplotlib writes them."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "parity-zoo",
        "font.family": "sans-serif",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "hatch.linewidth": 0.6,
    }
    units = [unit for unit in _TITLES if any(row.unit == unit for row in result.rows)]
    groups = [[row for row in result.rows if row.unit == unit] for unit in units]
    heights = [len(rows) + 1.5 for rows in groups]
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(9, 0.48 * sum(heights)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(units), 1, squeeze=False, height_ratios=heights)
        for ax, unit, rows in zip(axes[:, 0], units, groups, strict=True):
            _bars(ax, unit, rows)
        handles = {
            text: handle
            for ax in axes[:, 0]
            for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles, loc="outside upper left", ncols=3, frameon=False
        )
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


def _bars(ax: Any, unit: str, rows: Sequence[Row]) -> None:
    """A group of bars a row, with the numbers at their ends."""
    from matplotlib.ticker import EngFormatter

    sides = [s for s in COLUMNS if any(getattr(row, s) is not None for row in rows)]
    width = 0.84 / len(sides)
    for i, side in enumerate(sides):
        colour, hatch = _BARS[side]
        places = [
            (place + (i - (len(sides) - 1) / 2) * width, getattr(row, side))
            for place, row in enumerate(rows)
            if getattr(row, side) is not None
        ]
        bars = ax.barh(
            [place for place, _ in places],
            [value for _, value in places],
            width,
            label=side,
            color=colour,
            hatch=hatch,
            edgecolor=_INK,
            linewidth=0.4,
        )
        labels = [_number(value, unit) for _, value in places]
        ax.bar_label(bars, labels, padding=3, fontsize=8, color=_INK)
    ax.set_yticks(range(len(rows)), [_short_label(row) for row in rows])
    ax.invert_yaxis()
    if unit == "µs":
        ax.set_xscale("log")
    else:
        ax.xaxis.set_major_formatter(EngFormatter())
    ax.margins(x=0.12, y=0.02)
    ax.set_title(_TITLES[unit], loc="left", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)


def _label(row: Row) -> str:
    named = row.section in ("forward", "gradient")
    return f"{row.section}: {row.quantity}" if named else row.quantity


def _short_label(row: Row) -> str:
    """What the title above the bars does not say."""
    return row.section if row.unit in ("bytes", "FLOP", "operations") else _label(row)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return f"{value:.3f}"
    return f"{value:,.1f}" if unit == "µs" else f"{value:,.0f}"


def _header() -> tuple[str, ...]:
    return ("of", "quantity", *COLUMNS, "unit")


def _title(result: SideBySide) -> str:
    return f"Linen and NNX side by side: {one_line(result.target)}"


def _description(result: SideBySide) -> str:
    return " ".join(
        f"{_label(row)} in {row.unit}: "
        + ", ".join(
            f"{side} {text}" for side, text in zip(COLUMNS, values(row), strict=True)
        )
        + "."
        for row in result.rows
        if row.section != "code" or row.quantity == "all files"
    )
