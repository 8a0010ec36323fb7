"""Markdown tables for docs/: options of ``LLM``, engine, server and sampling, implementations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from absorbed_mla import registry
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import flag_of, switches_of
from absorbed_mla.serving.option_schema import REQUIRED, Option, needed_words, needs_in, options_of
from absorbed_mla.serving.options import CommonFields, EngineFields
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.cli import ServerOptions
from benchmarks.kit.tables import markdown_table
from checkpoint_conversion.model_type import MODELS

# What options without bounds accept, by type.
_OF_KIND = {str: "text", Path: "a path", Mapping[str, object]: "fields"}
_OR_AUTO = " or 'auto'"
_HEAD = ["option", "default", "accepts", "what it is"]


def llm_options(docs: Path) -> str:
    """Options of ``LLM``, with those flags that are not their names."""
    return _table(LLMOptions, options_of(LLMOptions), _other_flags)


def engine_options(docs: Path) -> str:
    """Options that the engine has in another way than ``LLM``, and the names of the others."""
    common = options_of(CommonFields)
    own = [name for name in options_of(EngineFields) if name not in common]
    same = ", ".join(f"`{name}`" for name in common)
    return f"{_table(EngineFields, own)}\n\nAs of `LLM`: {same}."


def server_flags(docs: Path) -> str:
    """Flags of the server beside those of ``LLM``."""
    lines = []
    for one in options_of(ServerOptions).values():
        if bool not in one.kinds:
            lines.append([f"`{flag_of(one)}`", *_cells(ServerOptions, one)])
            continue
        for flag, value in switches_of(one).items():
            lines.append([f"`{flag}`", "off", "", one.flag_help.get(value, one.help)])
    return markdown_table(["flag", *_HEAD[1:]], lines, ["flag", *_HEAD])


def sampling_parameters(docs: Path) -> str:
    """Parameters of a request, in Python and in JSON."""
    return _table(SamplingParams, options_of(SamplingParams))


def _table(
    cls: type, names: Iterable[str], besides: Callable[[Option], str] = lambda one: ""
) -> str:
    """A line for each option, with what stands besides its name."""
    known = options_of(cls)
    lines = [[f"`{name}`{besides(known[name])}", *_cells(cls, known[name])] for name in names]
    return markdown_table(_HEAD, lines, _HEAD)


def _other_flags(one: Option) -> str:
    """Flags that are not the option's name."""
    flags = switches_of(one) if bool in one.kinds else [flag_of(one)]
    others = [f"`{flag}`" for flag in flags if flag != "--" + one.name.replace("_", "-")]
    return f" ({', '.join(others)})" if others else ""


def _cells(cls: type, one: Option) -> list[str]:
    """Default, what an option accepts, and what it is and needs."""
    default = one.unset if one.default is None else f"`{one.default}`"
    if one.default is REQUIRED:
        default = "-"
    needed = (needed_words(cls, *other) for other in needs_in(cls).get(one.name, {}).items())
    # It gives way, whatever is asked for.
    needs = ", ".join(f"`{text.removesuffix(_OR_AUTO)}`" for text in needed)
    text = f"{one.help}; needs {needs}" if needs else one.help
    return [cell.replace("``", "`") for cell in (default, _accepted(one), text)]


def _accepted(one: Option) -> str:
    """What an option accepts, in as few words as its default and type leave unsaid."""
    if one.kinds == (bool,):
        return ""
    words = one.words.removeprefix("one of ") or _OF_KIND[one.kinds[-1]]
    return re.sub("^an integer (of |(?=from))|, or None", "", words)


# Name of the table -> registry and what its entries are called.
KINDS = {
    "support attention backends": (registry.ATTENTION_BACKENDS, "backend"),
    "support paged backends": (registry.PAGED_BACKENDS, "backend"),
    "support sparse backends": (registry.SPARSE_BACKENDS, "backend"),
    "support indexer backends": (registry.INDEXER_BACKENDS, "backend"),
    "support context parallel": (registry.CP_STRATEGIES, "strategy"),
    "support caches": (registry.LATENT_CACHES, "cache"),
    "support checkpoint layouts": (registry.CHECKPOINT_LAYOUTS, "layout"),
    "support models": (MODELS, "`model_type`"),
}
# A further column, of entries that have it -> its head.
_COLUMNS = {"forms": "form", "released": "released"}


def support(name: str, docs: Path) -> str:
    """A table of the support matrix: every implementation or model type of a registry."""
    implementations, kind = KINDS[name]
    entries = list(implementations)
    more = {name: head for name, head in _COLUMNS.items() if any(hasattr(e, name) for e in entries)}
    lines = [
        [f"`{e.name}`", *(", ".join(getattr(e, name)) for name in more), e.summary] for e in entries
    ]
    head = [kind, *more.values(), "what it is"]
    return markdown_table(head, lines, head)


def models_run(docs: Path) -> str:
    """What tests ran of each model type that is not refused, by the tables of the tests."""
    from tests.conversion.models import EVALUATED, WHOLE

    lines = []
    for name, architecture in WHOLE.items():
        evaluated, whole = "yes" if architecture in EVALUATED.values() else "no", "yes"
        released = ", ".join(MODELS[name].released)
        lines.append([f"`{name}`", released, evaluated, evaluated, whole, whole])
    head = ["`model_type`", "released", "logits", "round trip", "training", "generation"]
    return markdown_table(head, lines, head)


TABLES: dict[str, Callable[[Path], str]] = {
    "llm options": llm_options,
    "engine options": engine_options,
    "server flags": server_flags,
    "sampling parameters": sampling_parameters,
    "support models run": models_run,
    **{name: partial(support, name) for name in KINDS},
}
