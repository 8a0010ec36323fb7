"""Parser of tables of mutations: lines of code, and the wrong ones that replace them.

A line without indentation names a file; below it stands one mutation after the other::

    absorbed_mla/norm.py
      a_name: the right text -> the wrong one, nothing if it is left out
      a_longer_one: the right text
        -> the wrong one
      the_longest:
        - the right text
        |its next line, with all of its indentation
        -> the wrong one
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A change that makes the code wrong: in ``file``, ``right`` becomes ``wrong``."""

    file: str
    right: str
    wrong: str


def read(text: str) -> dict[str, Mutation]:
    """The mutations of a table by name.

    Raises:
        ValueError: If a name occurs twice.
    """
    found: dict[str, Mutation] = {}
    file = ""
    entry: list[str] = []  # name, right and wrong text
    for line in [*text.strip("\n").split("\n"), ""]:
        if line.startswith("    |"):
            entry[-1] += "\n" + line[5:]
        elif line.startswith("    ->"):
            entry.append(line[7:])
        elif line.startswith("    - "):
            entry[1] = line[6:]
        else:
            if entry:
                name, right, wrong = entry
                if name in found:
                    raise ValueError(f"two mutations are named {name}")
                found[name] = Mutation(file, right, wrong)
            entry = []
            if line.startswith("  "):
                name, _, texts = line[2:].partition(":")
                right, arrow, wrong = texts[1:].partition(" ->")
                entry = [name, right, wrong[1:]] if arrow else [name, right]
            else:
                file = line
    return found
