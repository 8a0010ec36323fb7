"""Run scripts/generate.py and scripts/train.py in the processes of the tests."""

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.support.auxiliary_losses import forget_auxiliary_losses

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

# Imported here and not by the command: Megatron's engine needs the real stderr on import.
import absorbed_mla.serving.executor.local  # noqa: F401
import generation.run  # noqa: F401
import training.run  # noqa: F401
from generation.entry import main
from training import megatron_loop
from training.entry import main as train_main


@dataclass(frozen=True)
class Done:
    """The result of a command: exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict]:
        """The objects of --json: one for each prompt in order, then the totals."""
        *prompts, totals = map(json.loads, self.out.splitlines())
        return [*sorted(prompts, key=lambda row: row["index"]), totals]


def generate(*argv: object, stdin: bytes = b"") -> Done:
    return _run(main, argv, stdin)


def train(*argv: object) -> Done:
    return _run(train_main, argv, b"")


def _run(command, argv: tuple, stdin: bytes) -> Done:
    out, err, given = (io.TextIOWrapper(io.BytesIO(x), "utf-8") for x in (b"", b"", stdin))
    forget_auxiliary_losses()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", given),
        # Otherwise an error would be written to the error file of this rank.
        mock.patch.dict(os.environ, {"TORCHELASTIC_ERROR_FILE": ""}),
        # The process group is the tests'.
        mock.patch.object(megatron_loop, "finish", lambda: None),
    ):
        code = command([str(word) for word in argv])
    for stream in (out, err):
        stream.flush()
    return Done(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))
