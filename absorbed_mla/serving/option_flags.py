"""Flags of command lines, from the declaration of options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from absorbed_mla.serving.option_schema import Option, options_of

# Of a value on the command line, and what stands for it in --help.
_PARSED: dict[Any, tuple[type, str]] = {
    int: (int, "N"),
    float: (float, "X"),
    Path: (str, "FOLDER"),
}


def add_flags(
    parser: Any,
    cls: type,
    names: Iterable[str] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> None:
    """Add the flags of options to a parser, or a group of one.

    What is parsed has the names of the options, or of the flags that the program calls otherwise.

    Args:
        parser: Anything with ``add_argument``.
        cls: Class of :class:`~absorbed_mla.serving.option_checks.Options`.
        names: Of the options; None: all.
        flags: Option -> its flag, if the program calls it otherwise.
        defaults: Option -> its default, if the program has another.
        helps: Option -> its help, if the program means something else.
    """
    known = options_of(cls)
    for name in known if names is None else names:
        one = known[name]
        default = (defaults or {}).get(name, one.default)
        text = (helps or {}).get(name, "")
        common = {"dest": _attribute(name, flags), "default": default}
        if bool in one.kinds:
            _add_switches(parser, one, text, common)
        else:
            flag = (flags or {}).get(name) or flag_of(one)
            _add_value(parser, one, flag, text, common)


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
    *,
    flags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The options that flags of :func:`add_flags`, with these arguments, have set."""
    own = options_of(cls) if names is None else names
    return {name: getattr(args, _attribute(name, flags)) for name in own}


def _attribute(name: str, flags: Mapping[str, str] | None) -> str:
    return (flags or {}).get(name, name).removeprefix("--").replace("-", "_")


def _add_switches(parser: Any, one: Option, text: str, common: Mapping[str, Any]) -> None:
    for flag, value in switches_of(one).items():
        parser.add_argument(
            flag,
            action="store_const",
            const=value,
            help=_shown(text or one.flag_help.get(value, one.help)),
            **common,
        )


def _add_value(parser: Any, one: Option, flag: str, text: str, common: Mapping[str, Any]) -> None:
    kind, metavar = _PARSED.get(one.kinds[-1], (str, None))
    text = text or one.help
    known = one.unset if common["default"] is None else common["default"]
    parser.add_argument(
        flag,
        type=kind,
        choices=one.choices or None,
        metavar=None if one.choices else metavar,
        help=_shown(text if "(default: " in text else f"{text} (default: {known})"),
        **common,
    )


def _shown(text: str) -> str:
    """A help text as argparse takes it."""
    return text.replace("``", "").replace("%", "%%")
