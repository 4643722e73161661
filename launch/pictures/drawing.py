"""SVG elements, and files that hold one picture (no torch, no drawing library).

charts.py            pieces of a page: lines, dots, columns, bars
schedule_picture.py  `triaxis schedule print --form svg`
topology_picture.py  `triaxis topology --output layout.svg`
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Literal

from triaxis.engine.errors import TriaxisError

_FONT = {
    "font_family": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
    "style": "font-variant-numeric: tabular-nums",
}


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """Write an SVG element.

    Args:
        name: of the element, such as `rect`.
        content: SVG; text in it is escaped by the caller.
        attributes: numbers are written with two decimals at most; `font_size` becomes `font-size`.
    """
    written = "".join(f' {key.replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def text(
    content: str,
    x: float,
    y: float,
    size: float,
    *,
    fill: str = "#333333",
    anchor: Literal["start", "middle", "end"] = "start",
    weight: Literal["normal", "bold"] = "normal",
) -> str:
    """Write a line of text.

    Args:
        content: escaped here.
        x: of its start, middle or end (`anchor`), in pixels.
        y: of the middle of a capital letter, in pixels.
        size: of the font, in pixels.
        fill: colour; a page's CSS does not change it.
        anchor: part of the text that is at `x`.
    """
    style = f"fill: {fill}; font-size: {_value(size)}px" + (f"; font-weight: {weight}" if weight != "normal" else "")
    return element("text", escape(content), x=x, y=y + 0.36 * size, text_anchor=anchor, style=style)


def check_path(path: Path) -> None:
    """Refuse a file name that says another format than SVG.

    Raises:
        TriaxisError: `path` does not end in .svg.
    """
    if path.suffix.lower() != ".svg":
        raise TriaxisError(
            f"the picture cannot be written to {path}: pictures are SVG, and other programs would misread the file by its name. "
            f"Give a path that ends in .svg, such as {path.with_suffix('.svg') if path.name else 'picture.svg'}."
        )


def write_picture(path: Path, width: float, height: float, label: str, parts: Sequence[str]) -> None:
    """Write one picture on a white ground.

    Args:
        path: ends in .svg.
        width: in pixels.
        height: in pixels.
        label: the picture in words, for readers that cannot see it.
        parts: elements, in the order in which they are drawn.

    Raises:
        TriaxisError: `path` does not end in .svg, or cannot be written.
    """
    check_path(path)
    ground = element("rect", width=width, height=height, fill="#ffffff")
    content = "\n".join(["", element("title", escape(label)), ground, *parts, ""])
    view = f"0 0 {_value(width)} {_value(height)}"
    svg = element("svg", content, xmlns="http://www.w3.org/2000/svg", width=width, height=height, viewBox=view, **_FONT)
    try:
        path.write_text(svg + "\n", encoding="utf-8")
    except OSError as error:
        raise TriaxisError(
            f"the picture cannot be written to {path}: {error}. Give a path in a folder that can be written."
        ) from error
