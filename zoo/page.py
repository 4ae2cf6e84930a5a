"""A report as one page of HTML that needs nothing else, and as Markdown; both from the same sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from zoo.plot import Chart, chart_svg

_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "|*<"})

SHORT = 20  # letters of a cell that is not broken over lines

STYLE = """
:root { color-scheme: light dark;
  --ink: #1a1a1a; --paper: #ffffff; --soft: #595959; --line: #d5d5d5; --stripe: #f5f5f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #161616; --soft: #b0b0b0; --line: #444444; --stripe: #202020; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
p { max-width: 60rem; }
.table { overflow-x: auto; border: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; }
th.number { white-space: normal; }
td.short { white-space: nowrap; }
td.name { font-weight: 600; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--stripe); }
.charts { display: grid; margin-top: 1rem; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; max-width: 36rem; min-width: 0; }
figcaption { color: var(--soft); font-size: 0.875rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
"""


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        columns: (title, whether it holds text); numbers stand right.
        rows: one cell for each column.
    """

    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A part of a report: a title, sentences, then a table, then charts; any of these may be missing."""

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None
    charts: Sequence[Chart] = ()


def to_html(title: str, sections: Sequence[Section]) -> str:
    """One page: style and pictures are inside, nothing is fetched, and it follows the reader's light or dark."""
    body = "\n".join(_html_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # A browser that looks for an icon would report that there is none.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html_section(section: Section) -> str:
    parts = [f"<section>\n<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(line)}</p>" for line in section.lines]
    if section.table is not None:
        parts.append(_html_table(section.title, section.table))
    if section.charts:
        figures = "\n".join(
            f"<figure>\n{chart_svg(chart)}\n<figcaption>{escape(chart.title)}</figcaption>\n</figure>"
            for chart in section.charts
        )
        parts.append(f'<div class="charts">\n{figures}\n</div>')
    return "\n".join([*parts, "</section>"])


def _html_table(title: str, table: Table) -> str:
    def cell(tag: str, text: str, column: int) -> str:
        kind = "number" if not table.columns[column][1] else "name" if column == 0 and tag == "td" else ""
        kind = kind or ("short" if tag == "td" and len(text) <= SHORT else "")
        return f"<{tag}" + (f' class="{kind}"' if kind else "") + f">{escape(text)}</{tag}>"

    head = "".join(cell("th", name, column) for column, (name, _) in enumerate(table.columns))
    rows = "\n".join(
        "<tr>" + "".join(cell("td", text, column) for column, text in enumerate(row)) + "</tr>" for row in table.rows
    )
    # The table scrolls, not the page; the keyboard must reach it too.
    return (
        f'<div class="table" role="region" aria-label="{escape(title, quote=True)}" tabindex="0">\n<table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The same in Markdown; a chart is the picture NAME.png beside it."""
    lines = [f"# {title.translate(_MARKS)}", ""]
    for section in sections:
        lines += [f"## {section.title.translate(_MARKS)}", ""]
        for line in section.lines:
            lines += [line.translate(_MARKS), ""]
        if section.table is not None:
            columns = section.table.columns
            lines.append(_markdown_row([name for name, _ in columns]))
            lines.append("|" + "|".join("---" if text else "---:" for _, text in columns) + "|")
            lines += [*(_markdown_row(row) for row in section.table.rows), ""]
        for chart in section.charts:
            lines += [f"![{chart.title}]({chart.name}.png)", ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.translate(_MARKS).replace("\n", " ") for cell in cells) + " |"
