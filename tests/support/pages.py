"""The pages of README.md and docs/ as fenced blocks, and a fresh checkout to run them in."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Kinds of blocks that tests/readme runs, in the order of the page, unless a comment says why not.
EXECUTED = ("bash", "python")
# With a prompt, in README.md and CONTRIBUTING.md: never run.
SHOWN = ("console",)
# Text, such as a tree of files.
DRAWN = ("text",)
# A block, with the comment in front of it: <!-- not run: why -->
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<reason>[^\n]+) -->\n(?P=indent))?"
    r"```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
# Variables that a test run may have, but not a user's shell.
_OF_A_TEST_RUN = re.compile(
    r"ABSORBED_MLA_\w+|PYTHON\w+|COV\w+|PYTEST\w+|TORCH\w+|OMP_NUM_THREADS|VIRTUAL_ENV"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|MASTER_\w+|GLOO_SOCKET_IFNAME|CUDA_VISIBLE_DEVICES"
)


@dataclass(frozen=True)
class Block:
    """A fenced block; its kind stands behind the opening fence."""

    kind: str
    text: str
    # Of the opening fence, from 1.
    line: int
    # Why no test runs it, as the comment in front of it says.
    reason: str | None = None

    @property
    def runs(self) -> bool:
        """Whether ``tests/readme`` runs it."""
        return self.kind in EXECUTED and self.reason is None

    def commands(self) -> list[str]:
        """The shell's commands, continuation lines joined, comments left to the shell."""
        text = self.text.replace("\\\n", " ")
        prompt = "$ " if self.kind in SHOWN else ""
        return [line.removeprefix(prompt) for line in text.splitlines() if line.strip()]


def all_pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, and every page of docs/."""
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [*top, *sorted(DOCS.glob("*.md")), *sorted((DOCS / "measurements").glob("*.md"))]


def blocks(text: str) -> list[Block]:
    return [
        Block(
            kind=m["kind"],
            text=textwrap.dedent(m["text"]),
            line=text.count("\n", 0, text.index("```", m.start())) + 1,
            reason=m["reason"],
        )
        for m in _BLOCK.finditer(text)
    ]


def script(page: list[Block], name: str = "README.md") -> str:
    """A bash script that runs the blocks in order that can run, and prints the line of each."""
    parts = ["set -e"]
    for block in page:
        if not block.runs:
            continue
        parts.append(f"echo '=== {name}:{block.line}'")
        if block.kind == "bash":
            parts.append(block.text)
        else:
            parts.append(f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK")
    return "\n".join([*parts, f"echo '=== {name}: end'"]) + "\n"


def user_environment() -> dict[str, str]:
    """The environment variables of a user's new shell, and that idle threads sleep.

    OpenMP's would take as much of a processor as those that work: a third of these pages' time.
    """
    own = {k: v for k, v in os.environ.items() if not _OF_A_TEST_RUN.fullmatch(k)}
    return {**own, "OMP_WAIT_POLICY": "PASSIVE"}


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
