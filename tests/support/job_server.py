"""A process that has imported PyTorch and Megatron, and forks the programs that tests run."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from console.parent import ends_with_this_process
from tests.support.environment import without_launcher

ROOT = Path(__file__).resolve().parents[2]
_STARTING = 120.0


class JobServer:
    """Runs programs of one or more ranks, one job at a time. A context manager.

    Args:
        modules: More modules that the server imports.
        paths: Folders of these modules, besides the repository.
    """

    def __init__(self, modules: list[str], paths: list[Path]) -> None:
        search = [str(ROOT), *map(str, paths), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.forked", "--serve", *modules],
            env=without_launcher(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(search)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=ends_with_this_process(),
        )

    def __enter__(self) -> JobServer:
        return self

    def __exit__(self, *_) -> None:
        # The server ends at the end of its input.
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()

    def run(
        self,
        argv: list[object],
        folder: Path,
        ranks: int = 0,
        timeout: float = 300,
        grace: float = 10,
    ) -> tuple[list[int | None], list[str], list[str]]:
        """Run a program in ``folder``, as one process or as ``ranks`` like torchrun's.

        The other ranks are killed ``grace`` seconds after one has failed, all after ``timeout``.

        Returns:
            By rank: exit codes as of :func:`tests.support.forked.run`, stdouts and stderrs.
        """
        outs, errs = (
            [folder / f".{name}{rank}" for rank in range(ranks or 1)] for name in ("out", "err")
        )
        for path in [*outs, *errs]:
            path.write_text("")
        job = {
            "argv": [str(word) for word in argv],
            "folder": str(folder),
            "ranks": ranks,
            "timeout": timeout,
            "grace": grace,
            "outputs": [[str(path) for path in pair] for pair in zip(outs, errs)],
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout + _STARTING)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            raise AssertionError("the job server does not answer")
        codes = json.loads(answer)
        return codes, [path.read_text() for path in outs], [path.read_text() for path in errs]
