"""The commands and the Python of README.md and docs/, as they stand, in a fresh checkout."""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.combinations import thinned
from tests.support.forked_environment import forks_programs

# Enough for checkpoints and losses; the text of the model is not looked at.
_FEW_ITERATIONS = "bash scripts/quickstart.sh --train-iters 10 "
# Pages of which something can run, after README.md, whose files they use.
_GUIDES = [
    page
    for page in sorted(pages.DOCS.rglob("*.md"))
    if any(block.runs for block in pages.blocks(page.read_text()))
]


@pytest.fixture(scope="module")
def page() -> list[pages.Block]:
    return pages.blocks((pages.ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A fresh checkout, whose environment lacks the project."""
    if reason := pages.missing_requirement():
        pytest.skip(reason)
    folder = pages.checkout(tmp_path_factory.mktemp("a new user") / "absorbed_mla")
    pages.lend_packages(folder)
    with forks_programs(folder / ".venv") if thinned() else contextlib.nullcontext():
        yield folder


def run(folder: Path, script: str) -> str:
    """Output of a script in a new shell; fails with the end of it if a command did."""
    done = subprocess.run(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env=pages.user_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def output(page, folder) -> str:
    """Of all blocks of README.md, one after the other, in one shell."""
    script, count = re.subn(
        r"^bash scripts/quickstart\.sh ", _FEW_ITERATIONS, pages.script(page), flags=re.MULTILINE
    )
    assert count == 1
    return run(folder, script)


def test_every_block_runs(page, output):
    """A command that fails ends the shell: it did not, and reached the end of the page."""
    executed = [block for block in page if block.runs]
    for block in executed:
        assert f"=== README.md:{block.line}\n" in output
    assert output.rstrip().endswith("=== README.md: end")
    assert len(executed) >= 3


def test_what_the_page_promises(output):
    # What the page's first program has just trained on, not just any text.
    assert re.search(r"^three, four, fiv$", output, re.MULTILINE)
    assert "our model wrote the same tokens as transformers" in output
    assert re.findall(r"log-prob gap max (\S+)", output) == ["0.0e+00"] * 2


@pytest.mark.parametrize("guide", _GUIDES, ids=lambda page: page.stem)
def test_every_block_of_a_guide_runs(guide, folder, output):
    """In the shell that index.md tells to open, where README.md's commands have run."""
    script = pages.script(pages.blocks(guide.read_text()), guide.name)
    assert run(folder, f"source .venv/bin/activate\n{script}").rstrip().endswith(": end")


def test_git_ignores_what_the_commands_leave(folder, output):
    assert pages.new_files(folder) == []


def test_commands_of_the_quickstart_can_be_pasted(folder, output):
    """Its first line and its last lines: activate as it says, then run what it printed."""
    quickstart = output[: output.index("To run these commands")]
    printed = re.findall(r"^\$ (.+)$", quickstart, re.MULTILINE)
    assert len(printed) == 6
    [activate] = re.findall(r"^source \S+/activate$", output, re.MULTILINE)
    # The others start torchrun like the page's commands do.
    converts = [line for line in printed if " convert " in line]
    assert len(converts) == 2
    run(folder, "\n".join(["set -e", activate, *converts]) + "\n")


def test_a_program_beside_the_clone(folder, output):
    """The folder of the clone has the package's name, and is no package."""
    program = "from absorbed_mla import AbsorbedMLAOptions; import specs, checkpoint_conversion"
    run(folder.parent, f"source {folder.name}/.venv/bin/activate && python -c '{program}'")
