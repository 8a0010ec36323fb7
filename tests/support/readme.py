"""README.md as a list of fenced blocks, and a fresh checkout to run them in."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Kinds of blocks that tests/readme runs, in the order of the page.
EXECUTED = ("bash", "python")
# Kinds that are not run: they need a GPU, a download or much time.
SHOWN = ("console",)
# Text, such as a tree of files.
DRAWN = ("text",)
# Variables that a test run may have, but not a user's shell.
_OF_A_TEST_RUN = re.compile(
    r"ABSORBED_MLA_\w+|PYTHON\w+|COV\w+|PYTEST\w+|TORCH\w+|OMP_NUM_THREADS|VIRTUAL_ENV"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_\w+|GLOO_SOCKET_IFNAME|CUDA_VISIBLE_DEVICES"
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        kind: What stands behind the opening fence.
        text: Between the fences.
        line: Of the opening fence, from 1.
    """

    kind: str
    text: str
    line: int

    def commands(self) -> list[str]:
        """The shell's commands, continuation lines joined, comments left to the shell."""
        text = self.text.replace("\\\n", " ")
        prompt = "$ " if self.kind in SHOWN else ""
        return [line.removeprefix(prompt) for line in text.splitlines() if line.strip()]


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a Markdown text."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1) for m in found]


def script(page: list[Block]) -> str:
    """A bash script that runs the ``EXECUTED`` blocks in order and prints the line of each."""
    parts = ["set -e"]
    for block in page:
        if block.kind not in EXECUTED:
            continue
        parts.append(f"echo '=== README.md:{block.line}'")
        if block.kind == "bash":
            parts.append(block.text)
        else:
            parts.append(f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK")
    return "\n".join([*parts, "echo '=== README.md: end'"]) + "\n"


def user_environment() -> dict[str, str]:
    """The environment variables of a user's new shell."""
    return {k: v for k, v in os.environ.items() if not _OF_A_TEST_RUN.fullmatch(k)}


def checkout(folder: Path) -> Path:
    """Copy all files that git does not ignore to ``folder``, like a fresh clone."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def new_files(folder: Path) -> list[str]:
    """Files that were created in a ``checkout`` and that git does not ignore."""
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout.splitlines()


def lend_packages(folder: Path) -> None:
    """Make ``folder/.venv`` as an earlier version of the scripts left it, without a network.

    Its packages are those of the running interpreter; the project is not installed in it.
    """
    environment = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "lent.pth").write_text("\n".join(packages) + "\n")
    make_command(environment / "bin", "torchrun = torch.distributed.run:main")
    stamp = 'source scripts/environment.sh; wanted_stamp >"$ENVIRONMENT/$STAMP"'
    subprocess.run(["bash", "-c", stamp], cwd=folder, env=user_environment(), check=True)


def make_command(folder: Path, entry_point: str) -> None:
    """Write a command of an installed package into ``folder`` as pip does."""
    from pip._vendor.distlib.scripts import ScriptMaker, enquote_executable

    maker = ScriptMaker(None, str(folder))
    maker.executable = enquote_executable(str(folder / "python"))
    maker.variants = {""}
    maker.make(entry_point)


def missing_requirement() -> str | None:
    """Why the page's commands cannot run here, or None."""
    import torch

    if torch.cuda.is_available():
        return "the scripts use this machine's python3, and no environment of their own"
    needed = ("pip", "setuptools", "matplotlib", "tqdm", "transformers", "safetensors", "rich")
    missing = [name for name in (*needed, "xxhash") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None
