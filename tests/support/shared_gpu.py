"""A process that keeps a GPU busy, so that others have it in turns: ``with shared_gpu(): ...``."""

import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator

import torch

_READY = "multiplies\n"


@contextlib.contextmanager
def shared_gpu(device: str = "cuda") -> Iterator[None]:
    """Within, another process multiplies matrices there, without a pause."""
    command = [sys.executable, "-m", __name__, device]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        try:
            assert other.stdout.readline() == _READY, "it has ended"
            yield
            assert other.poll() is None, "it has ended before the test"
        finally:
            other.kill()


def _multiply(device: str) -> None:
    """Multiply until the process that reads what this one says has ended, however it did."""
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    said = False
    # Its end of the pipe can then be read: nothing is written there.
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(20):
            product = x @ x
        product[0, 0].item()
        if not said:
            print(_READY, end="", flush=True)
            said = True


if __name__ == "__main__":
    _multiply(sys.argv[1])
