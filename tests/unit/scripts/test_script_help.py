"""``--help`` of every script comes at once, and explains every option.

Neither help nor a mistyped option may wait for the imports of PyTorch and Megatron, which take
seconds.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import without_launcher

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
HEAVY = {"torch", "megatron", "numpy", "transformers", "matplotlib", "safetensors"}
# Their options are parsed elsewhere: by quickstart.sh, and by Megatron (test_pretrain_gpt.py).
ELSEWHERE = {"quickstart", "benchmarks/pretrain_gpt"}
FILES = [path for path in SCRIPTS.rglob("*.py") if "__main__" in path.read_text()]
NAMES = sorted({str(path.relative_to(SCRIPTS).with_suffix("")) for path in FILES} - ELSEWHERE)
# Modules in the folder of the scripts.
NO_SCRIPTS = {"counting"}
COMMANDS = [name for name in NAMES if name not in NO_SCRIPTS]

# Runs a script with --help; reports the modules it imported and the options of its parser.
PROBE = """
import argparse, json, os, runpy, sys
report, script = sys.argv[1:]
options = []
of_parser = argparse.ArgumentParser.print_help

def print_help(self, file=None):
    of_parser(self, file)
    formatter = self._get_formatter()
    for action in self._actions:
        if action.help is not argparse.SUPPRESS and action.dest != "help":
            name = (action.option_strings or [action.dest])[0]
            text = formatter._expand_help(action) if action.help else ""
            option = bool(action.option_strings)
            options.append([name, text, option, action.required])

argparse.ArgumentParser.print_help = print_help
sys.argv = [script, "--help"]
sys.path[0] = os.path.dirname(script)
code = None
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    code = end.code
loaded = sorted({name.partition(".")[0] for name in sys.modules})
with open(report, "w") as file:
    json.dump({"code": code, "options": options, "loaded": loaded}, file)
"""


def ran(*command: object, **variables: str) -> subprocess.CompletedProcess:
    words, env = [str(word) for word in command], without_launcher(**variables)
    return subprocess.run(words, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def helped(tmp_path_factory):
    """Output of a script's --help and report of the probe; run once for each script."""
    folder, known = tmp_path_factory.mktemp("help"), {}

    def run(name: str) -> tuple[str, dict]:
        if name not in known:
            report = folder / f"{Path(name).name}.json"
            done = ran(sys.executable, "-c", PROBE, report, SCRIPTS / f"{name}.py")
            assert report.exists(), done.stderr[-2000:]
            known[name] = done.stdout, json.loads(report.read_text())
        return known[name]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_help_needs_no_long_import(helped, name):
    out, seen = helped(name)
    assert not seen["code"]
    assert not HEAVY & set(seen["loaded"])
    assert len(out) > 50


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_means_and_its_default(helped, name):
    out, seen = helped(name)
    assert out.startswith(f"usage: {Path(name).name}.py")
    if name.startswith("benchmarks/"):
        assert ast.get_docstring(ast.parse((SCRIPTS / f"{name}.py").read_text())) in out
    assert seen["options"]
    for option, text, is_option, required in seen["options"]:
        meaning = text.partition("(default:")[0].strip()
        assert len(meaning) > 4, f"{option}: {text!r}"
        if is_option and not required:
            assert "(default: " in text, f"{option}: {text!r}"
            assert "(default: )" not in text, f"{option}: {text!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_typo_is_one_line(name):
    """In an interpreter that cannot import PyTorch."""
    script = SCRIPTS / f"{name}.py"
    block = f"""
import runpy, sys
sys.modules.update(torch=None, megatron=None, numpy=None)
sys.argv, sys.path[0] = [{str(script)!r}, "--no-such-option"], {str(script.parent)!r}
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    done = ran(sys.executable, "-c", block)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith(f"{Path(name).name}.py: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", sorted(NO_SCRIPTS))
def test_modules_say_that_they_are_no_scripts(name):
    for words, code in ((["--help"], 0), ([], 2)):
        done = ran(sys.executable, SCRIPTS / f"{name}.py", *words)
        assert (done.returncode, done.stderr) == (code, "")
        assert f"{name}.py is no script" in done.stdout


def test_only_one_of_many_processes_prints_help():
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    done = ran(sys.executable, SCRIPTS / "train.py", "--help", **ranks)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
