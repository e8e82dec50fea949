# SPDX-License-Identifier: Apache-2.0
"""About how wide a line of text is in a usual sans-serif typeface, to decide which labels fit."""

from __future__ import annotations

_CAPITAL, _SPACING, _OTHER = (
    7.0,
    1.5,
    3.6,
)  #: height of capitals, between letters, width of an unlisted character
_WIDTHS = {
    0.6: "'!",
    0.8: "il.,:;",
    1.2: "j",
    1.4: "()[]",
    1.6: " ",
    2.3: "r",
    2.4: "Ift-",
    2.8: "/*",
    3.0: "J",
    3.3: "s",
    3.4: "c?<>",
    3.5: "kz",
    3.6: "hnux",
    3.8: "Labdegpqvy+=_",
    3.9: "F",
    4.0: "Eo",
    4.2: "0123456789",
    4.3: "PS",
    4.4: "B",
    4.5: "KRZ",
    4.6: "HNUXY#",
    4.8: "ACDTV",
    5.0: "G&",
    5.4: "Mw",
    5.6: "OQ%",
    5.8: "m",
    6.6: "W",
}
_WIDTH = {char: width for width, chars in _WIDTHS.items() for char in chars}


def text_width(text: str, size: float) -> float:
    """The width of ``text`` in letters of ``size``, whose capitals are 0.72 of that high.

    >>> text_width("11", 10) == 2 * text_width("1", 10)
    True
    """
    return sum(_WIDTH.get(char, _OTHER) + _SPACING for char in text) * (0.72 * size / _CAPITAL)
