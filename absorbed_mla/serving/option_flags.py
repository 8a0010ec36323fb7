"""Command-line flags generated from the declaration of options."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absorbed_mla.serving.option_schema import Option, options_of

# Of a value on the command line, and what stands for it in --help.
_PARSED: dict[Any, tuple[type, str]] = {int: (int, "N"), float: (float, "X"), Path: (str, "FOLDER")}


def add_flags(
    parser: Any,
    cls: type,
    names: Iterable[str] | None = None,
    flags: Mapping[str, str] = {},
    **changes: Mapping[str, Any],
) -> None:
    """Add the flags of options to a parser, or a group of one.

    What is parsed has the names of the options, or of the flags that the program calls otherwise.

    Args:
        names: Of the options; None: all.
        flags: Option -> its flag, if the program calls it otherwise.
        changes: Option -> ``default`` and ``help``, if the program has others.
    """
    known = options_of(cls)
    for name in known if names is None else names:
        one, change = known[name], changes.get(name, {})
        default = change.get("default", one.default)
        common = {"dest": _attribute(name, flags), "default": default}
        if bool in one.kinds:
            for flag, value in switches_of(one).items():
                text = _shown(one.flag_help.get(value, one.help))
                parser.add_argument(flag, action="store_const", const=value, help=text, **common)
            continue
        kind, metavar = _PARSED.get(one.kinds[-1], (str, None))
        several = {"nargs": "+"} if typing.get_origin(one.kinds[-1]) is tuple else {}
        text = change.get("help", one.help)
        if "(default: " not in text:
            text += f" (default: {one.unset if default is None else default})"
        parser.add_argument(
            flags.get(name) or flag_of(one),
            type=kind,
            choices=one.choices or None,
            metavar=None if one.choices else metavar,
            help=_shown(text),
            **several,
            **common,
        )


def flag_of(one: Option) -> str:
    """The flag that sets an option."""
    return one.flag or "--" + one.name.replace("_", "-")


def switches_of(one: Option) -> dict[str, Any]:
    """Flags of an option that is on or off -> values: the other than the default, and its words."""
    words = [value for value in one.choices if not isinstance(value, bool)]
    flag = flag_of(one)
    return {flag: not one.default, **{f"{flag}-{word}": word for word in words}}


def given_options(
    args: argparse.Namespace,
    cls: type,
    names: Iterable[str] | None = None,
    flags: Mapping[str, str] = {},
) -> dict[str, Any]:
    """The options that flags of :func:`add_flags`, with these arguments, have set."""
    own = options_of(cls) if names is None else names
    return {name: getattr(args, _attribute(name, flags)) for name in own}


def _attribute(name: str, flags: Mapping[str, str]) -> str:
    return flags.get(name, name).removeprefix("--").replace("-", "_")


def _shown(text: str) -> str:
    """A help text as argparse takes it."""
    return text.replace("``", "").replace("%", "%%")
