"""HTML pages that should need nothing else: well-formed, nothing fetched, every chart valid."""

from __future__ import annotations

import html.parser
import re
import xml.etree.ElementTree as ET
from typing import Any


class Strict(html.parser.HTMLParser):
    """Every tag closed by its own end, in order; addresses collected."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def check_page(text: str) -> None:
    """Well-formed, nothing fetched, every chart valid XML without NaN."""
    parser = Strict()
    parser.feed(text)
    assert not parser.open and not parser.addresses
    assert {"script", "link", "iframe", "img"}.isdisjoint(parser.seen)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/)", text)
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    for drawing in drawings:
        root = ET.fromstring(drawing)
        box = [float(value) for value in root.attrib["viewBox"].split()]
        assert box[2] > 0 and box[3] > 0
        assert not re.search(r"\b(nan|inf)\b", drawing, re.I)
    assert 'name="viewport"' in text and "prefers-color-scheme" in text
