"""Whether a command of the pages could start: its program exists and its parser takes the options.

Nothing runs: a program is left as soon as it has parsed its command line.
"""

import argparse
import importlib
import os
import re
import runpy
import shlex
import sys
import tomllib
from typing import NoReturn

import pytest

from tests.support.pages import ROOT

# Programs that are not ours, nor Python: known by name.
FOREIGN = ("curl", "hf", "ncu", "ruff", "mkdocs")
# Megatron-LM's programs, which are in no wheel.
MEGATRON = ("pretrain_gpt.py", "pretrain_hybrid.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_ASSIGNMENT = re.compile(r"\w+=.*")


class _Parsed(BaseException):
    """The program has parsed its command line."""


class _Rejected(BaseException):
    """The parser does not take it."""


def require_command(command: str, patch: pytest.MonkeyPatch) -> None:
    """Fail unless the command names a program that exists, with options that it has."""
    if re.match(r"\w+=\$\(", command):
        return require_command(command[command.index("$(") + 2 : -1], patch)
    words = [word for word in shlex.split(command, comments=True) if word != "..."]
    for separator in ("&&", ";"):
        if separator in words:
            at = words.index(separator)
            require_command(shlex.join(words[:at]), patch)
            return require_command(shlex.join(words[at + 1 :]), patch)
    while words and (words[0] == "export" or _ASSIGNMENT.fullmatch(words[0])):
        words = words[1:]
    if not words or words[0] in FOREIGN:
        return None
    program, *rest = words
    if program == "torchrun":
        return _require_torchrun(rest, patch)
    if program == "python":
        return _require_python(rest, patch)
    if program == "bash":
        return _require_shell_script(*rest)
    if program == "pip":
        return _require_extras(rest)
    if program == "source":
        assert rest == [".venv/bin/activate"], command
        return None
    assert program in PROJECT["scripts"], f"no program {program}"
    module, function = PROJECT["scripts"][program].split(":")
    call = getattr(importlib.import_module(module), function)
    return _require_options(program, call, rest, patch)


def _require_torchrun(words: list[str], patch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    if given.training_script in MEGATRON:
        return _require_spec(given.training_script_args)
    module = ["-m"] if given.module else []
    return _require_python([*module, given.training_script, *given.training_script_args], patch)


def _require_python(words: list[str], patch: pytest.MonkeyPatch) -> None:
    first, *rest = words
    if first == "-c":
        compile(rest[0], "-c", "exec")
    elif first == "-m" and rest[0] == "pytest":
        missing = [word for word in rest[1:] if not (ROOT / word.split("::")[0]).exists()]
        assert not missing
    elif first == "-m":
        assert importlib.util.find_spec(rest[0]), rest[0]
    else:
        path = ROOT / first
        assert path.is_file(), f"no file {first}"
        patch.setattr(sys, "path", [str(path.parent), *sys.path])
        start = lambda: runpy.run_path(str(path), run_name="__main__")  # noqa: E731
        _require_options(first, start, rest, patch)


def _require_options(program, call, words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Call a program, and leave it when its parser has taken the words."""
    parse, parse_known = (
        argparse.ArgumentParser.parse_args,
        argparse.ArgumentParser.parse_known_args,
    )
    inside = []

    def attempt(function, self, args, namespace):
        if inside:
            return function(self, args, namespace)
        inside.append(self)
        try:
            function(self, args, namespace)
        except (ValueError, SystemExit) as error:
            if getattr(error, "code", None) != 0:  # else --help was asked for
                raise _Rejected(str(error)) from error
        raise _Parsed

    def reject(code: int) -> NoReturn:
        raise _Rejected(f"exit code {code}")

    with patch.context() as patched:
        for name, function in (("parse_args", parse), ("parse_known_args", parse_known)):
            replaced = lambda self, args=None, namespace=None, function=function: attempt(  # noqa: E731
                function, self, args, namespace
            )
            patched.setattr(argparse.ArgumentParser, name, replaced)
        patched.setattr(sys, "argv", [program, *words])
        # How a script ends that reports a mistake before its parser is asked.
        patched.setattr(os, "_exit", reject)
        try:
            call()
        except _Parsed:
            return
        except _Rejected as error:
            pytest.fail(f"{program} {shlex.join(words)}: {error}")
    pytest.fail(f"{program} has not parsed its command line")


def _require_shell_script(script: str, *words: str) -> None:
    text = (ROOT / script).read_text()
    missing = [word for word in words if word.split("=")[0] not in text]
    assert not missing, f"{script} does not know {missing}"


def _require_extras(words: list[str]) -> None:
    assert words[0] == "install", words
    for word in words:
        for extras in re.findall(r"^\.\[(.*)\]$", word):
            unknown = set(extras.split(",")) - set(PROJECT["optional-dependencies"])
            assert not unknown, f"no extra {unknown}"


def _require_spec(words: list[str]) -> None:
    """``--spec MODULE NAME`` of a program of Megatron-LM's leads to something."""
    if "--spec" in words:
        module, name = words[words.index("--spec") + 1 :][:2]
        assert hasattr(importlib.import_module(module), name), (module, name)
