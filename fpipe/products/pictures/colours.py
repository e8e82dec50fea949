# SPDX-License-Identifier: Apache-2.0
"""The colours of the pictures: hues for kinds of work, shades for chunks of a rank, tints for
causes of idle time.

The hues were chosen so that any shade of one kind stays apart from any shade of another under
protanopia, deuteranopia and tritanopia as well (a test measures it). Work and memory have the same
colours on light and on dark paper. Every picture also writes letters, so that colour is never
the only sign.
"""

from __future__ import annotations

from ...actions import KINDS

#: by line a name, and its colour on light and on dark paper; the causes of idle time are those of
#: ``scene.CAUSES``; ``t0`` to ``t9`` are tints, from much earlier over equal to much later, and not
#: there
_TABLE = """
paper         #ffffff  #14181d
raised        #ffffff  #232a32
ink           #1d2733  #e6eaef
faint         #5b6673  #a3aebb
line          #d5dae1  #3a434e
mark          #d6006c  #ff6fb1
curve         #1f9d6b  #1f9d6b
message-line  #3d4a59  #c3ccd6
warmup        #dbe1df  #2f3030
tail          #aebed2  #334a5d
imbalance     #d0cf82  #585847
message       #f8dcfd  #3d2741
other         #d2b48c  #52372b
t0            #00545f  #b8f9fc
t1            #1b8086  #56dae6
t2            #5cada4  #30b0bc
t3            #a5d8c2  #3a8a94
t4            #fbf8d2  #646870
t5            #f0b4b0  #a85a38
t6            #dd7f8e  #d4823f
t7            #bf4a72  #fba75a
t8            #93164f  #ffd9ae
t9            #5b6673  #a3aebb
"""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
THEME = {name: (light, dark) for name, light, dark in _ROWS}


def rgb(colour: str) -> tuple[int, int, int]:
    """``#rrggbb`` as three numbers.

    >>> rgb("#0b4b49")
    (11, 75, 73)
    """
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


def mix(a: str, b: str, share: float) -> str:
    """``share`` of the way from ``a`` to ``b``.

    >>> mix("#000000", "#ffffff", 0.5)
    '#808080'
    """
    parts = (round(x + (y - x) * share) for x, y in zip(rgb(a), rgb(b), strict=True))
    return f"#{bytes(parts).hex()}"


def palette(shades: int, dark: bool = False) -> dict[str, str]:
    """Every colour of a picture by its key: the names of ``THEME``, and an op with its shade,
    such as ``F0``.

    >>> palette(2)["F1"], palette(2, dark=True)["paper"]
    ('#a3d2fa', '#14181d')
    """
    colours = {name: pair[dark] for name, pair in THEME.items()}
    for op in KINDS:
        for shade in range(shades):
            colours[f"{op}{shade}"] = fill(op, shade, shades)
    return colours


def fill(op: str, shade: int = 0, shades: int = 1) -> str:
    """The colour of ``op`` in the chunk numbered ``shade`` of ``shades``.

    >>> fill("F"), fill("F", 1, 2)
    ('#4ba3f5', '#a3d2fa')
    """
    first, last = KINDS[op].colours
    if shades == 1:
        return first
    reach = 0.75 if shades == 2 else 1.0  # two chunks need not go to the palest
    return mix(first, last, reach * min(shade / (shades - 1), 1.0))


def ink(colour: str) -> str:
    """Black or white, whichever reads better on ``colour`` (the contrast rule of WCAG 2).

    >>> ink("#0b4b49"), ink("#ffe391")
    ('#ffffff', '#000000')
    """
    return "#ffffff" if luminance(colour) < 0.179 else "#000000"


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(colour: str) -> list[float]:
    """The light of red, green and blue, each 0 to 1."""
    shares = [value / 255 for value in rgb(colour)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
