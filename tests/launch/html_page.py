"""A page of HTML as tests read it: elements that begin and end in order, and the text of each section."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser

VOID = {"meta", "br"}
"""Elements of HTML that have no end, of those that pages use."""


class Page(HTMLParser):
    """Elements that begin and end in order; what they load; the text that a reader sees, by section."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.sections: dict[str, str] = {}
        self.text = ""
        self._section = ""
        self.feed(html)
        self.close()
        assert self.open == [], f"never ended: {self.open}"

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"{tag} has an attribute twice"
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in given.items():
            assert not name.startswith("on"), f"{tag} runs {name}"
            if name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster"):
                self.links.append(value or "")
        if (own := given.get("id")) is not None:
            assert own not in self.ids, f"two elements have the id {own}"
            self.ids.add(own)
            self._section = own

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> ends something else"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data
            self.sections[self._section] = self.sections.get(self._section, "") + data


def self_contained(html: str) -> Page:
    """Read a page, and check that it runs nothing and needs nothing from elsewhere."""
    page = Page(html)
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "embed", "link", "base", "form"})
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links), page.links
    assert not re.search(r"https?:|url\(|@import|javascript:", html, re.IGNORECASE), "it needs nothing from elsewhere"
    return page
