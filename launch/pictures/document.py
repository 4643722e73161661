"""Assembles a page as one HTML file without scripts."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from triaxis.launch.pictures.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: the browser loads and runs nothing, whatever text a page contains."""

LONG_VALUE = 15
"""Largest number of characters in a tile's value that is shown in the large font."""


def html_document(
    title: str, heading: str, before: str, sections: Mapping[str, tuple[str, str]], footer: str, *, state: str = ""
) -> str:
    """Assemble an HTML page. Titles, heading and footer are escaped here; HTML arguments are not.

    Args:
        title: title for the browser's tab.
        heading: largest line on the page.
        before: HTML between the heading and the first section.
        sections: id -> (title, HTML) for each section.
        footer: last line on the page.
        state: HTML next to the heading.
    """
    links = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, (name, _) in sections.items())
    body = "".join(
        f'<section id="{key}"><h2>{escape(name)}</h2>{inside}</section>' for key, (name, inside) in sections.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>"
        f"<header><h1>{escape(heading)}{state}</h1><nav>{links}</nav></header>{before}{body}"
        f"<footer>{escape(footer)}</footer></main></body></html>\n"
    )


def tiles(entries: Iterable[tuple[str, str]]) -> str:
    """Write (name, value) tiles as HTML. Names and values are escaped here."""
    shown = (
        f'<div class="tile"><b{_LONG if len(value) > LONG_VALUE else ""}>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in entries
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


_LONG = ' class="long"'

Column = tuple[str, str]
"""A column's heading, and the CSS class of its cells, such as `n` for numbers."""


def html_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, tall: bool = False) -> str:
    """Write a table that scrolls sideways on a narrow screen. Headings are escaped here; cells are HTML.

    Args:
        columns: headings and classes; with empty headings alone, there is no line of headings.
        rows: a cell per column.
        tall: whether a long table also scrolls downwards.
    """
    head = "".join(f'<th class="{style}">{escape(name)}</th>' for name, style in columns)
    body = "".join(f"<tr>{_cells(columns, row)}</tr>" for row in rows)
    shown_head = f"<tr>{head}</tr>" if any(name for name, _ in columns) else ""
    return f'<div class="wide{" tall" if tall else ""}"><table>{shown_head}{body}</table></div>'


def _cells(columns: Sequence[Column], row: Sequence[str]) -> str:
    return "".join(f'<td class="{style}">{cell}</td>' for (_, style), cell in zip(columns, row, strict=True))
