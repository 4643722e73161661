"""Writes SVG elements, and SVG files with one picture each.

The files in this folder draw these pictures:

    charts.py              charts in a page
    schedule_picture.py    `triaxis schedule print --form svg`
    topology_picture.py    `triaxis topology --output layout.svg`
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
        name: element name, such as `rect`.
        content: SVG inside the element; the caller escapes its text.
        attributes: attributes by name, with `_` for `-` (`font_size`); numbers get at most two decimals.
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
        content: plain text, escaped here.
        x: position of the text's start, middle or end (see `anchor`), in pixels.
        y: vertical middle of a capital letter, in pixels.
        size: font size, in pixels.
        fill: colour, set as a style so that a page's CSS does not change it.
        anchor: part of the text that lies at `x`.
        weight: font weight.
    """
    style = f"fill: {fill}; font-size: {_value(size)}px" + (f"; font-weight: {weight}" if weight != "normal" else "")
    return element("text", escape(content), x=x, y=y + 0.36 * size, text_anchor=anchor, style=style)


def check_path(path: Path) -> None:
    """Refuse a file name that does not end in .svg.

    Raises:
        TriaxisError: `path` does not end in .svg.
    """
    if path.suffix.lower() != ".svg":
        raise TriaxisError(
            f"the picture cannot be written to {path}: pictures are SVG, and other programs would misread the file by its name. "
            f"Give a path that ends in .svg, such as {path.with_suffix('.svg') if path.name else 'picture.svg'}."
        )


def write_picture(path: Path, width: float, height: float, label: str, parts: Sequence[str]) -> None:
    """Write one picture on a white background.

    Args:
        path: file path, ending in .svg.
        width, height: size in pixels.
        label: description for readers who cannot see the picture.
        parts: elements, in drawing order.

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
