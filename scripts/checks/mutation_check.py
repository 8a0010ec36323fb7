#!/usr/bin/env python3
"""Break the package on purpose, one line at a time, and see which test notices.

Each mutation is applied to a copy of the checkout; the unit tests, those of the conversion and the
distributed tests at TP=2 run until the first failure. A mutation that no test notices makes the
script exit with 1.

    $ python scripts/checks/mutation_check.py
    (nothing broken)         not caught
    rope_pairing             caught in tests/unit by tests/unit/attention/test_shapes.py

With ``--tests`` only the named test files run, which is quick and shows what they notice.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from difflib import get_close_matches
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checks.mutations import MUTATIONS
from checks.mutations.table import Mutation
from console.parent import ends_with_this_process
from console.parser import Parser
from console.script import leave, run_script

REPO = Path(__file__).resolve().parents[2]


def pytest(paths: list[str], processes: int = 1) -> list[str]:
    """The command that runs these tests until the first failure."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else [])]
    command += ["-m", "pytest", "-x", "-q", "-W", "ignore", *paths]
    # Its tests would notice whatever is broken.
    return [*command, "--deselect", "tests/unit/scripts/checks/test_mutations.py"]


SUITES = {
    "tests/unit": pytest(["tests/unit"]),
    "tests/conversion": pytest(["tests/conversion"]),
    "tests/distributed (TP=2)": pytest(["tests/distributed"], processes=2),
}


def main() -> int:
    """Run the chosen mutations and report; returns the exit code."""
    return run_script("mutation_check.py", _check)


def _check() -> int:
    parser = Parser("mutation_check.py", __doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTATIONS)} (default: all)")
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="run these files only (default: all tests)"
    )
    parser.add_argument("--processes", type=int, default=1, help="for --tests")
    arguments = parser.parse_args()
    names = arguments.names or list(MUTATIONS)
    unknown = sorted(set(names) - set(MUTATIONS))
    if unknown:
        near = get_close_matches(unknown[0], MUTATIONS, 3, 0.3)
        parser.error(f"unknown mutation {unknown[0]}; known are {', '.join(near)}, ..., see --help")
    for test in arguments.tests or []:
        if not (REPO / test.partition("::")[0]).exists():
            parser.error(f"--tests must be of this repository, which has no {test}")
    chosen = {"the chosen files": pytest(arguments.tests or [], arguments.processes)}
    suites = chosen if arguments.tests else SUITES
    if first_failure("(nothing broken)", None, suites):
        parser.error("the tests fail without any mutation; mend that first")
    caught = [first_failure(name, MUTATIONS[name], suites) for name in names]
    return 0 if all(caught) else 1


def first_failure(name: str, mutation: Mutation | None, suites: dict[str, list[str]]) -> str | None:
    """The first test of ``suites`` that fails under ``mutation``, printed as it is found."""
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copy = Path(folder)
        copy_checkout(copy)
        if mutation:
            mutate(copy / mutation.file, mutation)
        for suite, command in suites.items():
            failure = run_until_failure(command, copy)
            if failure:
                print(f"{name:24s} caught in {suite} by {failure}", flush=True)
                return failure
    print(f"{name:24s} not caught", flush=True)
    return None


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks or would track, as it is in the working tree."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def mutate(target: Path, mutation: Mutation) -> None:
    """Write the wrong line; the right one must be there exactly once."""
    source = target.read_text()
    if source.count(mutation.right) != 1:
        raise SystemExit(f"{mutation.file} does not hold {mutation.right!r} once; update the list")
    target.write_text(source.replace(mutation.right, mutation.wrong))


def run_until_failure(command: list[str], folder: Path) -> str | None:
    """The id of the first failed test, or None if all passed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    result = subprocess.run(command, **how, preexec_fn=ends_with_this_process())
    if result.returncode == 0:
        return None
    # Only a failed test counts; a broken environment or a syntax error proves nothing.
    found = re.search(r"^FAILED (.+?)(?: - |$)", result.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(f"{' '.join(command)} did not run:\n{result.stdout}\n{result.stderr}")
    return found.group(1)


if __name__ == "__main__":
    leave(main())
