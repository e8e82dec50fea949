"""The colours of the pictures: one hue per kind of work, one shade per chunk of a rank.

The hues were chosen so that any shade of one kind stays apart from any shade of another under protanopia,
deuteranopia and tritanopia as well (a test measures it): amber and dark teal differ in lightness where their hues
fall together. Every picture also writes letters, so that colour is never the only sign.
"""

from __future__ import annotations

from functools import lru_cache

#: op -> (the first chunk's colour, the last one's)
RAMPS: dict[str, tuple[str, str]] = {
    "F": ("#3f97e6", "#c0e2fb"),
    "B": ("#e0a712", "#ffe391"),
    "I": ("#c03a2b", "#f28775"),
    "W": ("#0b4b49", "#4f8682"),
}

#: op -> what the legend says
WORDS: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}

PAPER, INK, FAINT, LINE, IDLE = "#ffffff", "#1d2733", "#66717f", "#d5dae1", "#f1f3f6"


def rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers.

    >>> rgb("#0b4b49")
    (11, 75, 73)
    """
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix(a: str, b: str, share: float) -> str:
    """``share`` of the way from ``a`` to ``b``.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(rgb(a), rgb(b), strict=True))


@lru_cache(maxsize=1024)
def fill(op: str, shade: int = 0, shades: int = 1) -> str:
    """The colour of ``op`` in the chunk numbered ``shade`` of ``shades``.

    >>> fill("F"), fill("F", 1, 2)
    ('#3f97e6', '#a0cff6')
    """
    first, last = RAMPS[op]
    reach = 0.75 if shades == 2 else 1.0  # two chunks need not go to the palest
    return mix(first, last, reach * min(shade, shades - 1) / max(shades - 1, 1))


@lru_cache(maxsize=1024)
def ink(colour: str) -> str:
    """Black or white, whichever reads better on ``colour`` (the contrast rule of WCAG 2).

    >>> ink("#0b4b49"), ink("#ffe391")
    ('#ffffff', '#10161d')
    """
    light = luminance(colour)
    dark = luminance("#10161d")
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / (dark + 0.05) else "#10161d"


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
