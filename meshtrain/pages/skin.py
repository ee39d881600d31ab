"""The template of every page: one HTML file that can be read without a server, a network or scripts.

All numbers come from the JSON of the command, which the page embeds. Text from run files, paths or programs is always
escaped with `esc`. Scripts only sort and search tables, and show values at the pointer.
"""
from __future__ import annotations

import functools
import html
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import meshtrain
from meshtrain import files
from meshtrain.units import seconds, size

ON_PAPER = 25       # rows of a brief table on paper; skin.css has the same number
LOG = 30.0          # an axis is logarithmic if its largest value exceeds the median by this factor
HERE = Path(__file__).parent
WIDTH, PHONE = 960, 360     # widths of a drawing and of its second layout, for screens where text would be too small
# Forbids loading anything, whatever text the page contains.
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
          "form-action 'none'; base-uri 'none'")
FOOT = ("This page is one file that loads and sends nothing. The element with the id data contains the JSON of its "
        "numbers.")


class PageSection(NamedTuple):
    name: str           # the id of its anchor
    heading: str
    body: str           # HTML


class Cell(NamedTuple):
    """A cell of a table. text: the shown text. exact: the number of the JSON, for sorting and as tooltip; None if the
    cell is no number. title: a tooltip in place of that number."""
    text: str
    exact: float | int | None = None
    title: str = ""


class Tile(NamedTuple):
    """A figure at the top of a page. note: text below the value. mark: "warn" for a problem."""
    name: str
    value: str
    note: str = ""
    mark: str = ""


class Column(NamedTuple):
    """A column of a table. kind: the style of its cells: "" for words, "n" for numbers, "some" for short texts, "long"
    for sentences, "code" for paths, "keep" for text without line breaks."""
    heading: str
    kind: str = ""


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether an axis of these values should be logarithmic, because a few are far above the median."""
    return min(values) > 0 and max(values) > LOG * statistics.median(values)


def number(show: Callable[[float], str], value: float | None) -> Cell:
    return Cell("–") if value is None else Cell(show(value), value)


of_bytes, of_seconds = functools.partial(number, size), functools.partial(number, seconds)
of_count, of_share = functools.partial(number, "{:,.0f}".format), functools.partial(number, "{:.1%}".format)


def esc(value) -> str:
    return html.escape(str(value), quote=True)


class Head(NamedTuple):
    """The top of a page. kind: the kind of page, shown above the title. verdict: the result in one sentence. lead: the
    subject of the page. top: HTML below the lead."""
    kind: str
    title: str
    verdict: str
    lead: str
    top: str


def document(head: Head, sections: Sequence[PageSection], data: dict) -> str:
    """Return a page as HTML. Sections without a body are left out. data: the JSON that is embedded."""
    sections = [section for section in sections if section.body]
    links = "".join(f'<a href="#{esc(s.name)}">{esc(s.heading)}</a>' for s in sections)
    bodies = "\n".join(f'<section id="{esc(s.name)}">\n<h2>{esc(s.heading)}</h2>\n{s.body}\n</section>'
                       for s in sections)
    # "<" is escaped, so that the JSON cannot end the element.
    embedded = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="meshtrain">
<title>{esc(head.title)} · {esc(head.kind)}</title>
<link rel="icon" href="data:,">
<style>
{_read("drawing.css")}{_read("skin.css")}</style>
<noscript><style>.search {{ display: none; }}</style></noscript>
</head>
<body>
<header>
<p class="kind">{esc(head.kind)}</p>
<h1>{esc(head.title)}</h1>
<p class="verdict">{esc(head.verdict)}</p>
<p class="lead">{esc(head.lead)}</p>
{head.top}
<nav aria-label="sections">{links}</nav>
</header>
<main>
{bodies}
</main>
<footer><p>{esc(program_line())}</p><p>{esc(FOOT)}</p></footer>
<script type="application/json" id="data">{embedded}</script>
<script>
{_read("skin.js")}</script>
</body>
</html>
"""


def program_line() -> str:
    """Return a line with time, host and versions of the program that writes the page."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    commit = f" (commit {revision})" if (revision := _commit()) else ""
    return (f"Written {now} by meshtrain {meshtrain.__version__}{commit}, jax {importlib.metadata.version('jax')}, "
            f"Python {platform.python_version()}, on {socket.gethostname()}: {platform.system()} {platform.machine()}, "
            f"{os.cpu_count()} CPUs.")


@functools.cache
def _commit() -> str:
    """Return the commit of the checkout that the program runs from, with a + if files are changed; "" outside one."""
    git = ["git", "-C", str(HERE), "--no-optional-locks"]
    try:
        inside, *_ = _lines([*git, "ls-files", "--error-unmatch", __file__])
        commit, *_ = _lines([*git, "rev-parse", "--short", "HEAD"])
        return commit + "+" * bool(inside and _lines([*git, "status", "--porcelain", "-uno", "--", str(HERE.parent)]))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def _lines(command: Sequence[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.splitlines()


def alone(drawing: str) -> str:
    """Return a drawing of a page as a standalone SVG file."""
    return drawing.replace(">", f"><style>{_read('drawing.css')}</style>", 1)


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def tiles(rows: Iterable[Tile]) -> str:
    """Return the row of tiles with the most important figures, as HTML."""
    def note(row: Tile) -> str:
        return f"<dd{_class(row.mark)}>{esc(row.note)}</dd>" if row.note else ""
    return '<dl class="tiles">' + "".join(
        f"<div><dt>{esc(row.name)}</dt><dd>{esc(row.value)}</dd>{note(row)}</div>" for row in rows) + "</dl>"


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{esc(text)}</p>"


def bullets(texts: Iterable[str], kind: str = "") -> str:
    items = "".join(f"<li>{esc(text)}</li>" for text in texts)
    return f"<ul{_class(kind)}>{items}</ul>" if items else ""


def figure(draw: Callable[..., str], caption: str = "", key: str = "") -> str:
    """Return a figure as HTML. draw: a function that returns the drawing for a width, as HTML. caption: the text below
    the figure. key: a legend as HTML."""
    figcaption = f"<figcaption>{esc(caption)}</figcaption>" if caption else ""
    return (f'<figure><div class="wide">{draw(width=WIDTH)}</div><div class="phone">{draw(width=PHONE)}</div>'
            f"{key}{figcaption}</figure>")


def fold(summary: str, body: str) -> str:
    """Return HTML that is folded until it is clicked; "" without a body. summary: text. body: HTML."""
    return f"<details><summary>{esc(summary)}</summary>{body}</details>" if body else ""


def assumptions(assumed: Mapping[str, float], reasons: Mapping[str, str]) -> str:
    """Return a folded table of assumptions. reasons: by name; some may be missing in the JSON of another version."""
    columns = [Column("assumed", "keep"), Column("value", "n"), Column("why", "long")]
    rows = [(name, number("{:g}".format, value), reasons.get(name, "")) for name, value in assumed.items()]
    return fold(f"The {len(rows)} assumed numbers, each with its reason (--assume NAME=VALUE changes one)",
                  table(columns, rows, "assumed"))


def key(rows: Iterable[tuple[int, str, str]]) -> str:
    """Return a colour legend as HTML. rows: (colour, name, value)."""
    swatch = '<svg viewBox="0 0 10 10" aria-hidden="true"><rect class="c{}" width="10" height="10"/></svg>'
    return '<ul class="key">' + "".join(f"<li>{swatch.format(color)}{esc(name)} <b>{esc(value)}</b></li>"
                                        for color, name, value in rows) + "</ul>"


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], name: str, *, search: str = "",
          total: Sequence[Cell | str] = (), marks: Sequence[str] = (), brief: bool = False,
          groups: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return a sortable table as HTML; "" without rows. name: its id. search: label of the filter field; "" for none.
    marks: a class per row. brief: whether to print only the first ON_PAPER rows on paper. groups: row number -> heading
    above it; sorting drops the headings."""
    if not rows:
        return ""
    marks = [*marks, *[""] * (len(rows) - len(marks))]
    heads = "".join(f'<th scope="col"{_class(column.kind)}>{esc(column.heading)}</th>' for column in columns)
    def heading(k: int) -> str:
        return f'<tr class="group"><td colspan="{len(columns)}">{esc(groups[k])}</td></tr>\n' if k in groups else ""

    body = "\n".join(f"{heading(k)}<tr{_class(mark)}>{_row(columns, row)}</tr>"
                     for k, (row, mark) in enumerate(zip(rows, marks)))
    foot = f"<tfoot><tr>{_row(columns, total)}</tr></tfoot>" if total else ""
    field = (f'<div class="search"><input type="search" data-table="{name}" placeholder="{esc(search)}" '
             f'aria-label="{esc(search)}" autocomplete="off" spellcheck="false"><output>{len(rows)}</output></div>')
    shape = " narrow" * (len(columns) < 5) + " brief" * brief
    left_out = paragraph(f"The first {ON_PAPER} of {len(rows)}; the page itself has all.", "small paper") if (
        brief and len(rows) > ON_PAPER) else ""
    return (f'{field if search else ""}<div class="table{shape}" tabindex="0" role="region" aria-label="{name}">'
            f'<table class="sorts" id="{name}">'
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>{foot}</table></div>{left_out}")


def _row(columns: Sequence[Column], row: Sequence[Cell | str]) -> str:
    cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)

    def broken(column: Column, text: str) -> str:
        return esc(text) if "keep" in column.kind else esc(text).replace("_", "_<wbr>")
    return "".join(f"<td{_class(column.kind)}{_exact(cell)}>{broken(column, cell.text)}</td>"
                   for column, cell in zip(columns, cells, strict=True))


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _exact(cell: Cell) -> str:
    exact = "" if cell.exact is None else f' data-v="{esc(cell.exact)}"'
    title = cell.title or cell.exact
    return exact if title is None or title == "" else f'{exact} title="{esc(title)}"'


# ---- the file --------------------------------------------------------------------------------------------------------


def check_free(option: str, path: str) -> None:
    """Check the output path before computing. Raises: ValueError if it exists or cannot be written."""
    if files.status(path):
        raise ValueError(f"{option}={path} is there already; give another file, or remove it")
    if not files.is_dir(Path(path).parent):
        raise ValueError(f"{option}={path} cannot be written: there is no directory {Path(path).parent}; give a file "
                         f"in a directory that exists")


def write(option: str, path: str, text: str) -> None:
    """Write a new file. option: the option that names the file, for messages. Raises: ValueError if it exists or cannot
    be written."""
    try:
        with open(Path(path), "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{option}={path} is there already; give another file, or remove it") from None
    except OSError as error:
        raise ValueError(f"{option}={path} cannot be written: {error.strerror}; give a writable file") from None
