"""One declaration of options: what a new entry needs, and that every use follows from it.

The first test puts one entry into a copy of the sources and finds the option everywhere.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import add_flags, given_options, switches_of
from absorbed_mla.serving.option_schema import (
    GIVEN,
    REQUIRED,
    Options,
    documented,
    excluding,
    like,
    needs_in,
    option,
    options_of,
)
from absorbed_mla.serving.options import CommonFields, EngineFields
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.cli import ServerOptions
from tests.support.refusal import refusal

ROOT = Path(__file__).resolve().parents[3]
CLASSES = (LLMOptions, EngineOptions, SamplingParams, ServerOptions)
EVERY = [(cls, name) for cls in CLASSES for name in options_of(cls)]

# File, the line before the new entry, and the entry.
ADDED = [
    (
        "absorbed_mla/serving/options.py",
        '    """Options that ``LLM`` and its engine have under one name."""\n',
        """
    page_colour: int = option(7, least=3, most=9, needs={"parity": (False,)})
    '''Of the cache's pages. They are many.'''
""",
    ),
    (
        "absorbed_mla/serving/sampling/parameters.py",
        "    ignore_eos: bool = option(",
        """    boredom: float | None = option(None, least=0, most=2, unset="none")
    '''Of the model.'''
""",
    ),
]
# Prints nothing if all is as it should be.
USES = """
import contextlib, io, sys
sys.path.append("scripts")
import pytest
from absorbed_mla import LLM, SamplingParams
from absorbed_mla.generation.options import EngineOptions
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.server import cli
from absorbed_mla.serving.server.chat_request import ChatRequest
from absorbed_mla.serving.server.protocol import CompletionRequest
from checks.tables.options import TABLES
from generation.arguments import parse_arguments

assert "absorbed_mla/serving/options.py" in sys.modules["absorbed_mla.serving.options"].__file__
assert sys.modules["absorbed_mla"].__file__.startswith(sys.argv[1])
refused = "page_colour must be an integer from 3 to 9, got 2"
flag = "--page-colour"

sizes = {"max_sequence_length": 64, "max_requests": 1}
assert EngineOptions(**sizes).page_colour == 7
assert EngineOptions(**sizes, page_colour=4).page_colour == 4
for make in (lambda: EngineOptions(**sizes, page_colour=2), lambda: LLM("x", page_colour=2)):
    with pytest.raises(ValueError, match=refused):
        make()
with pytest.raises(ValueError, match="page_colour needs parity=False, got True"):
    LLM("x", page_colour=4, parity=True)
given = LLMOptions(page_colour=5)
assert given.engine_options(64, None, None).page_colour == 5
assert "page_colour: Of the cache's pages. They are many." in LLMOptions.__doc__
assert "page_colour" in EngineOptions.__doc__


def help_of(parse, *words):
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        parse(*words)
    return " ".join(shown.getvalue().split())


line = "--page-colour N of the cache's pages (default: 7)"
assert line in help_of(cli.main, ["--help"])
assert cli.build_parser().parse_args(["folder", flag, "6"]).page_colour == 6
with contextlib.redirect_stderr(io.StringIO()) as error:
    assert cli.main(["folder", flag, "2"]) == 2
assert refused in error.getvalue()

command = ["--load", "x", "--preset", "tiny"]
assert line in help_of(parse_arguments, ["--help"], 1)
assert parse_arguments([*command, flag, "6"], 1).llm["page_colour"] == 6
with pytest.raises(ValueError, match="^--page-colour must be an integer from 3 to 9, got 2"):
    parse_arguments([*command, flag, "2"], 1)

row = "| `page_colour` | `7` | from 3 to 9 | of the cache's pages; needs `parity=False` |"
assert row in TABLES["llm options"](None)
assert "`page_colour`" in TABLES["engine options"](None)

assert SamplingParams(boredom=1).boredom == 1
messages = [{"role": "user", "content": "hi"}]
for kind, body in ((CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": messages})):
    asked = kind.model_validate({**body, "boredom": 1.5})
    assert asked.params().boredom == 1.5 and kind.model_validate(body).params().boredom is None
    for value in (3, -1):
        with pytest.raises(ValueError, match=f"boredom must be from 0 to 2, or None, got {value}"):
            kind.model_validate({**body, "boredom": value}).params()
    with pytest.raises(ValueError, match="valid number"):
        kind.model_validate({**body, "boredom": "much"})
assert "| `boredom` | none | from 0 to 2 | of the model |" in TABLES["sampling parameters"](None)
"""


@pytest.mark.usefixtures("forked_python")
def test_a_new_option_is_one_entry(tmp_path):
    """In a copy of the sources: of ``LLM`` and engine, and of sampling."""
    for folder in ("absorbed_mla", "scripts", "specs", "checkpoint_conversion"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file, before, entry in ADDED:
        text = (tmp_path / file).read_text()
        assert text.count(before) == 1
        place = text.index(before) + (len(before) if before.endswith("\n") else 0)
        (tmp_path / file).write_text(text[:place] + entry + text[place:])
    # Megatron may be found there only.
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", USES, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *others])},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-3000:]


class TestDeclarations:
    """Of what is there."""

    @pytest.mark.parametrize(("cls", "name"), EVERY)
    def test_entry(self, cls, name):
        one = options_of(cls)[name]
        assert one.default is REQUIRED or one.accepts(one.default)
        assert one.default is not None or one.unset, "what None means"
        assert len(one.help) > 8 and not one.help.endswith("."), "a phrase"
        assert f"        {name}: " in cls.__doc__

    def test_needs_name_options(self):
        """A misspelt one would count for neither class."""
        known = {**options_of(LLMOptions), **options_of(EngineOptions)}
        for one in known.values():
            assert set(one.needs) <= set(known)

    def test_llm_passes_every_option_on(self):
        """Under the engine's name: all that both have but those that depend on the model."""
        changed = {
            "host_cache_tokens": 640,
            "prefix_cache_dir": "x",
            "prefix_cache_bytes": 5,
            "prompt_logprobs": True,
            "num_speculative_tokens": 2,
            "seed": 3,
            "cache_tokens": 6400,
            "scheduling_policy": "priority",
            "cascade_attention": "off",
        }
        # They exclude a folder.
        returned = dict.fromkeys(
            ["enable_return_routed_experts", "enable_return_indexer_topk"], True
        )
        known = {*changed, *returned}
        assert known == set(options_of(CommonFields)), "a new one needs a value here"
        changed |= {"max_num_seqs": 5, "enable_chunked_prefill": False}
        made = LLMOptions(**changed).engine_options(128, None, None)
        names = {"max_num_seqs": "max_requests", "enable_chunked_prefill": "chunked_prefill"}
        for name, value in changed.items():
            assert getattr(made, names.get(name, name)) == value
        made = LLMOptions(**returned).engine_options(128, None, None)
        assert {name: getattr(made, name) for name in returned} == returned
        shared = LLMOptions(decode_context_parallel=True, enable_prefix_caching=False)
        made = shared.engine_options(128, None, None)
        assert made.decode_context_parallel is True and made.prefix_caching is False

    def test_former_names_of_the_classes(self):
        from absorbed_mla.generation import options, sampling

        assert options.EngineOptions is EngineOptions
        assert sampling.SamplingParams is SamplingParams


@documented
@dataclass(frozen=True, kw_only=True)
class Low(Options):
    """Low ones."""

    tokens: int | None = option(None, least=2, also=(0,), unset="all")
    """How many, of 1.5 kinds; or so. It may span
    lines."""
    caching: bool = option(True, flag="--no-caching", flag_help={False: "no cache"})
    """Cache."""
    graphs: int | None = option(None, unset="none")
    """MTP graphs."""
    whole: bool = option(
        False, needs={"caching": (True,), "graphs": (GIVEN,), "mode": ("a",), "other": (1,)}
    )
    """As a whole, 100 % of it."""
    heat: float = option(1.0, least=0)
    extra: Mapping[str, object] = option({})


@documented
@dataclass(frozen=True, kw_only=True)
class High(Options):
    """High ones."""

    share: float = option(0.5, above=0, most=1, note=" (1 is all)")
    """How much. More."""
    mode: str = option("auto", choices=("auto", "a", "b"))
    """Which one."""
    sharing: bool | str = option(False, choices=(False, True, "auto"))
    enable_caching: bool = like(Low, "caching")
    graphs: int | None = like(Low, "graphs", default=4)
    """Graphs of its own."""
    whole: bool = like(Low, "whole")
    number: int = option(least=0, most=9)


class Required(High):
    """With what must be given."""

    def __init__(self, **given) -> None:
        super().__init__(**{"number": 1, **given})


NOT_IN_ORDER = [
    (Low, {"tokens": 1}, "tokens must be an integer of at least 2, or 0, or None, got 1"),
    (Low, {"tokens": 2.0}, "tokens must be an integer"),
    (Low, {"tokens": True}, "got True"),
    (Low, {"tokens": "3"}, "got '3'"),
    (Low, {"graphs": 1.5}, "graphs must be an integer, or None, got 1.5"),
    (Low, {"caching": None}, "caching must be one of False, True, got None"),
    (Low, {"caching": "no"}, "got 'no'"),
    (Low, {"heat": float("inf")}, "heat must be at least 0, got inf"),
    (Low, {"heat": float("-inf")}, "heat must be at least 0, got -inf"),
    (Required, {"share": 0}, "share must be above 0 and at most 1 (1 is all), got 0"),
    (Required, {"share": float("nan")}, "got nan"),
    (Required, {"share": None}, "got None"),
    (Required, {"mode": "c"}, "mode must be one of auto, a, b, got 'c'"),
    (Required, {"sharing": 2}, "sharing must be one of False, True, auto, got 2"),
    (Required, {"number": 10}, "number must be an integer from 0 to 9, got 10"),
    (Required, {"number": -1}, "got -1"),
]
NOT_MET = [
    (Low, {"caching": False, "graphs": 1}, "whole needs caching=True, got False"),
    (Low, {}, "whole needs graphs, got None"),
    # By its own name of what the entry calls otherwise, and what only this class has.
    (Required, {"enable_caching": False}, "whole needs enable_caching=True, got False"),
    (Required, {"mode": "b"}, "whole needs mode='a' or 'auto', got 'b'"),
]


class TestSchema:
    @pytest.mark.parametrize(("cls", "given", "error"), NOT_IN_ORDER)
    def test_refused(self, cls, given, error):
        with refusal(error):
            cls(**given)

    def test_accepted(self):
        for tokens in (None, 0, 2, 10**30):
            assert Low(tokens=tokens).tokens == tokens
        assert High(number=0, share=1, mode="b", sharing="auto").share == 1
        with pytest.raises(TypeError, match="number"):
            High()

    def test_defaults_are_not_shared(self):
        assert Low().extra == {} and Low().extra is not Low().extra

    @pytest.mark.parametrize(("cls", "given", "error"), NOT_MET)
    def test_needs(self, cls, given, error):
        with refusal(error):
            cls(**given, whole=True)
        # Not in use it needs nothing.
        cls(**given)

    def test_needs_that_are_met(self):
        assert Low(whole=True, graphs=0).whole and High(whole=True, number=1).whole
        assert set(needs_in(Low)["whole"]) == {"caching", "graphs"}
        assert set(needs_in(High)["whole"]) == {"enable_caching", "graphs", "mode"}

    def test_excluding(self):
        options = High(whole=True, number=1, mode="a")
        assert [*excluding(options, "mode", "b")] == ["whole"]
        assert not [*excluding(options, "mode", "auto")]
        assert not [*excluding(dataclasses.replace(options, whole=False), "mode", "b")]

    def test_documentation(self):
        """A docstring behind a field; of an option like another's, that one's or its own."""
        low, high = options_of(Low), options_of(High)
        assert low["tokens"].text == "How many, of 1.5 kinds; or so. It may span lines."
        assert low["tokens"].help == "how many, of 1.5 kinds; or so"
        assert low["graphs"].help == "MTP graphs" and low["extra"].help == ""
        assert (high["enable_caching"].help, high["graphs"].help) == ("cache", "graphs of its own")
        lines = "Attributes:\n        share: How much. More.\n        mode: Which one.\n"
        assert lines in High.__doc__

    def test_own_options_come_first(self):
        assert next(iter(options_of(EngineFields))) == "max_sequence_length"
        assert [*options_of(EngineFields)][-1] == "seed"


class TestFlags:
    def parse(self, cls, *words: str, **how):
        parser = argparse.ArgumentParser()
        add_flags(parser, cls, **how)
        how = {name: value for name, value in how.items() if name in ("names", "flags")}
        return given_options(parser.parse_args(words), cls, **how), parser.format_help()

    def test_values(self):
        expected = {
            "share": 0.25,
            "mode": "b",
            "number": 3,
            "sharing": "auto",
            "enable_caching": False,
            "graphs": 4,
        }
        words = [
            "--share",
            "0.25",
            "--mode",
            "b",
            "--number",
            "3",
            "--sharing-auto",
            "--no-caching",
        ]
        found, shown = self.parse(High, *words, names=expected)
        assert found == expected
        assert "no cache" in shown and "(default: 0.5)" in shown

    def test_switches(self):
        known = options_of(High)
        assert switches_of(known["sharing"]) == {"--sharing": True, "--sharing-auto": "auto"}
        assert switches_of(known["enable_caching"]) == {"--no-caching": False}
        assert self.parse(Low, "--whole", names=["whole"])[0] == {"whole": True}
        assert "100 % of it" in self.parse(Low, names=["whole"])[1]

    def test_what_a_program_calls_otherwise(self):
        how = {"names": ["tokens"], "flags": {"tokens": "--num-tokens"}}
        found, shown = self.parse(Low, **how, tokens={"default": 5, "help": "of mine"})
        assert found == {"tokens": 5} and "--num-tokens N  of mine (default: 5)" in shown
        assert self.parse(Low, "--num-tokens", "9", **how)[0] == {"tokens": 9}

    def test_flags_are_not_names_of_two_options(self):
        parser = argparse.ArgumentParser()
        for cls in (LLMOptions, ServerOptions):
            add_flags(parser, cls)
