"""Tables of options as they are declared: of ``LLM``, its engine, its server and of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import flag_of, switches_of
from absorbed_mla.serving.option_schema import (
    REQUIRED,
    Option,
    needed_words,
    needs_of,
    options_of,
)
from absorbed_mla.serving.options import CommonFields, EngineFields
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.cli import ServerOptions
from benchmarks.kit.tables import markdown_table

# What options without bounds accept, by type.
_OF_KIND = {str: "text", Path: "a path", Mapping[str, object]: "names and values"}
_WORDS = ["default", "accepts", "what it is", "needs"]


def llm_options(docs: Path) -> str:
    """Options of ``LLM``, with those flags that are not their names."""
    lines = [
        [_name_and_flags(one), *_cells(one), _needs(LLMOptions, name)]
        for name, one in options_of(LLMOptions).items()
    ]
    head = ["option", *_WORDS]
    return markdown_table(head, lines, head)


def engine_options(docs: Path) -> str:
    """Options that the engine has in another way than ``LLM``, and the names of the others."""
    known = options_of(EngineFields)
    common = options_of(CommonFields)
    lines = [
        [f"`{name}`", *_cells(one), _needs(EngineFields, name)]
        for name, one in known.items()
        if name not in common
    ]
    head = ["option", *_WORDS]
    same = ", ".join(f"`{name}`" for name in common)
    return f"{markdown_table(head, lines, head)}\n\nAs of `LLM`: {same}."


def server_flags(docs: Path) -> str:
    """Flags of the server beside those of ``LLM``."""
    lines = []
    for one in options_of(ServerOptions).values():
        default, accepted, text = _cells(one)
        for flag, value in switches_of(one).items() if bool in one.kinds else ():
            lines.append([f"`{flag}`", "off", "-", one.flag_help.get(value, one.help)])
        if bool not in one.kinds:
            lines.append([f"`{flag_of(one)}`", default, accepted, text])
    head = ["flag", *_WORDS[:-1]]
    return markdown_table(head, lines, head)


def sampling_parameters(docs: Path) -> str:
    """Parameters of a request, in Python and in JSON."""
    lines = [[f"`{name}`", *_cells(one)] for name, one in options_of(SamplingParams).items()]
    head = ["parameter", *_WORDS[:-1]]
    return markdown_table(head, lines, head)


def _name_and_flags(one: Option) -> str:
    flags = switches_of(one) if bool in one.kinds else [flag_of(one)]
    others = [f"`{flag}`" for flag in flags if flag != "--" + one.name.replace("_", "-")]
    return f"`{one.name}`" + (f" ({', '.join(others)})" if others else "")


def _cells(one: Option) -> list[str]:
    """Default, what it accepts, and what it is."""
    default = one.unset if one.default is None else f"`{one.default}`"
    if one.default is REQUIRED:
        default = "-"
    accepted = one.words.removeprefix("one of ") or _OF_KIND[one.kinds[-1]]
    return [text.replace("``", "`") for text in (default, accepted, one.help)]


def _needs(cls: type, name: str) -> str:
    needed = (needed_words(cls, *one) for one in needs_of(cls, name).items())
    return ", ".join(f"`{text}`" for text in needed)


TABLES: dict[str, Callable[[Path], str]] = {
    "llm options": llm_options,
    "engine options": engine_options,
    "server flags": server_flags,
    "sampling parameters": sampling_parameters,
}
