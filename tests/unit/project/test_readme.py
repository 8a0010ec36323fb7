"""README.md without running it: its blocks parse, and what they name exists.

``tests/readme`` runs them.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import readme

sys.path.append(str(readme.ROOT / "scripts"))

from absorbed_mla.serving.export import hf_weights
from absorbed_mla.serving.server import cli as server_cli
from checkpoint_conversion import command_line
from generation import arguments as generation
from rollout import arguments as rollout
from training import arguments as training

PAGE = (readme.ROOT / "README.md").read_text()
BLOCKS = readme.blocks(PAGE)
_PARSERS = {
    "scripts/train.py": lambda words, ranks: training.parse_arguments(words),
    "scripts/generate.py": generation.parse_arguments,
    "scripts/rollout_train.py": rollout.parse_arguments,
}


def words_of(kinds: tuple[str, ...]) -> list[list[str]]:
    """Every command of these blocks as the shell splits it, without its comment."""
    return [
        shlex.split(command, comments=True)
        for block in BLOCKS
        if block.kind in kinds
        for command in block.commands()
    ]


def test_length():
    """One page: what is longer belongs into docs/."""
    assert PAGE.count("\n") <= 150


def test_kinds_of_blocks():
    """Whether a block is run is seen from its kind alone."""
    assert {block.kind for block in BLOCKS} == {*readme.EXECUTED, *readme.SHOWN, *readme.DRAWN}
    assert PAGE.count("```") == 2 * len(BLOCKS)


def test_the_two_commands_come_first():
    first, second = BLOCKS[:2]
    assert first.commands()[0].startswith("bash scripts/quickstart.sh")
    assert first.commands()[1].startswith("source .venv/bin/activate")
    assert second.commands()[0].startswith("bash scripts/run_tests.sh")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "bash"], ids=lambda b: b.line)
def test_bash_parses(block):
    done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "python"], ids=lambda b: b.line)
def test_python_parses_and_imports_what_exists(block):
    imports = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module.split(".")[0] in ("absorbed_mla", "specs", "megatron"):
            module = __import__(node.module, fromlist=["*"])
            for name in node.names:
                assert hasattr(module, name.name), (node.module, name.name)
    assert any(node.module == "absorbed_mla" for node in imports)


def test_model_of_the_page_can_be_exported():
    """What a newcomer begins with is one of DeepSeek's layers, so that all of this package fits."""
    lines = ast.parse(next(block.text for block in BLOCKS if block.kind == "python")).body
    # Calls that make process groups, which the tests have, and all behind the model.
    last = next(i for i, line in enumerate(lines) if ast.unparse(line).startswith("model = "))
    made = [line for line in lines[: last + 1] if not isinstance(line, ast.Expr)]
    names: dict = {}
    exec(compile(ast.Module(made, []), "README.md", "exec"), names)
    weights = dict(hf_weights(names["model"]))
    assert weights["model.layers.0.self_attn.kv_a_layernorm.weight"].shape == (32,)
    assert weights["lm_head.weight"].shape == (256, 128)


def test_torchrun_commands_have_options_that_exist():
    """Parsed by the scripts' own parsers; ``--load`` is looked at later."""
    commands = [words for words in words_of(("bash", "console")) if "torchrun" in words[0]]
    checked = 0
    for words in commands:
        [script] = [word for word in words if word.endswith(".py")]
        if script in _PARSERS:
            ranks = int(words[words.index("--nproc-per-node") + 1])
            _PARSERS[script](words[words.index(script) + 1 :], ranks)
            checked += 1
        else:
            assert script == "pretrain_gpt.py"  # Megatron's
    assert checked >= 3


def test_converter_commands_have_options_that_exist():
    commands = [w for w in words_of(("bash", "console")) if w[0] == "absorbed-mla-convert"]
    for words in commands:
        command_line.parse_arguments(words[1:])
    assert {words[1] for words in commands} == {"convert", "verify"}


def test_server_commands_have_options_that_exist():
    commands = [w for w in words_of(("bash", "console")) if w[0] == "absorbed-mla-serve"]
    assert [server_cli.build_parser().parse_args(words[1:]).model.name for words in commands]


def test_links_and_paths_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    links += re.findall(r"`?((?:scripts|docs)/[\w./-]+\w)", PAGE)
    assert len(links) > 15
    missing = [link for link in links if not (readme.ROOT / link).exists()]
    assert missing == []


def test_inputs_come_from_the_quickstart_or_an_earlier_command():
    """Nothing is loaded that nobody wrote."""
    quickstart = (readme.ROOT / "scripts/quickstart.py").read_text()
    written = {f"quickstart_output/{n}" for n in re.findall(r'output / "(\w+)"', quickstart)}
    assert "quickstart_output/trained" in written
    for words in words_of(("bash",)):
        if "torchrun" in words[0]:
            used = {words[i + 1] for i, w in enumerate(words) if w in ("--load", "--data")}
            made = {words[i + 1] for i, w in enumerate(words) if w == "--save"}
        elif words[0] == "absorbed-mla-convert":
            folders = [w for w in words[2:] if w.startswith("quickstart_output/")]
            convert = words[1] == "convert"
            used, made = set(folders[:1] if convert else folders), set(folders[1:])
        else:
            continue
        assert used <= written, words
        written |= made


class TestBlocks:
    def test_blocks_and_script(self):
        text = "a\n```bash\nx \\\n  y  # z\n```\n```console\n$ no\n```\n```python\np = 1\n```\n"
        bash, console, python = readme.blocks(text)
        assert (bash.kind, bash.line, bash.commands()) == ("bash", 2, ["x    y  # z"])
        assert console.commands() == ["no"]
        script = readme.script([bash, console, python])
        assert script.index("x \\") < script.index("p = 1")
        assert "no" not in script
        assert "=== README.md:2'" in script

    def test_a_command_that_fails_ends_the_script(self):
        page = readme.blocks("```bash\nfalse\n```\n")
        done = subprocess.run(["bash", "-c", readme.script(page)], capture_output=True, text=True)
        assert done.returncode == 1
        assert "end" not in done.stdout


def test_a_command_in_a_folder_with_a_space(tmp_path):
    """The interpreter's path stands in the command's first line, where a space would end it."""
    pytest.importorskip("pip._vendor.distlib")
    folder = tmp_path / "a new user"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    readme.make_command(folder, "find = shlex:quote")
    done = subprocess.run([folder / "find"], capture_output=True, text=True)
    # It was found and called, without what it needs.
    assert "quote() missing 1 required positional argument" in done.stderr


def test_docs_are_linked():
    """A page of docs/ that neither README.md nor another page of docs/ names is lost."""
    pages = [*(readme.ROOT / "docs").glob("*.md"), readme.ROOT / "README.md"]
    linked = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\]\(([\w./-]+\.md)", page.read_text())
    }
    assert {Path(page).resolve() for page in pages[:-1]} <= linked
