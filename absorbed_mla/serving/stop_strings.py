"""Finds stop strings in a text that grows, each character of it read once.

Aho and Corasick, "Efficient string matching", 1975: what a step costs does not depend on how many
strings there are, nor on how they overlap with themselves and the text.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence


class _Node:
    """A beginning of stop strings, the longest one that the text so far ends with.

    Attributes:
        depth: Its length.
        next: By character, beginnings that are longer by it.
        shorter: The longest other beginning that this one ends with; None of the empty one.
        ended: Strings that it ends with.
    """

    __slots__ = ("depth", "ended", "next", "shorter")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.shorter: _Node | None = None
        self.ended: list[str] = []

    def after(self, character: str) -> _Node:
        """The beginning that a text ends with which had this one before the character."""
        node: _Node | None = self
        while node is not None:
            if character in node.next:
                return node.next[character]
            node, empty = node.shorter, node
        return empty


@functools.lru_cache(maxsize=64)
def _beginnings(strings: tuple[str, ...]) -> _Node:
    """All of them, from the empty one on."""
    empty = _Node(0)
    for string in strings:
        node = empty
        for character in string:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.ended.append(string)
    waiting = deque([empty])
    while waiting:
        node = waiting.popleft()
        for character, longer in node.next.items():
            longer.shorter = empty if node.shorter is None else node.shorter.after(character)
            longer.ended += longer.shorter.ended
            waiting.append(longer)
    return empty


class StopStrings:
    """Those of one text.

    Args:
        strings: None of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._node = _beginnings(tuple(strings)) if strings else None
        self._read = 0

    @property
    def held_back(self) -> int:
        """Length of the longest end of the text after which a stop string would go on."""
        node = self._node
        while node is not None and not node.next:
            node = node.shorter
        return 0 if node is None else node.depth

    def read(self, text: str) -> tuple[int, str] | None:
        """Read what was added to the text.

        Returns:
            Of the strings that end in it, the one that begins first, and where.
        """
        if self._node is None:
            return None
        node, found = self._node, []
        for end, character in enumerate(text[self._read :], self._read + 1):
            node = node.after(character)
            found += [(end - len(string), string) for string in node.ended]
        self._node, self._read = node, len(text)
        return min(found, default=None)
