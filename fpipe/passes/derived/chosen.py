# SPDX-License-Identifier: Apache-2.0
"""``Chosen``: some leaves of a tree, as torch.func takes them, and the tree around others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ... import tree
from ...tree import Tree


class Chosen:
    """Some leaves of a tree, by a predicate or a flag for each leaf: ``leaves``, and the tree
    ``around`` others.

    >>> chosen = Chosen({"a": 1, "b": 2}, [False, True])
    >>> chosen.leaves, chosen.around([5])
    ([2], {'a': 1, 'b': 5})
    """

    def __init__(self, value: Tree, chosen: Callable[[object], bool] | Sequence[bool]):
        self._every, self._spec = tree.flatten(value)
        flags = map(chosen, self._every) if callable(chosen) else chosen
        self._indices = [i for i, flag in enumerate(flags) if flag]
        self.leaves: list[Any] = [self._every[i] for i in self._indices]

    def around(self, leaves: Sequence[object], rest: object = ...) -> Tree:
        """The tree with other leaves in place of the chosen ones; and ``rest`` in place of all
        others.
        """
        full = self._every.copy()
        if rest is not ...:
            full = [rest] * len(full)
        for i, leaf in zip(self._indices, leaves, strict=True):
            full[i] = leaf
        return tree.unflatten(self._spec, full)
