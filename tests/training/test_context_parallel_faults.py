"""If a context-parallel rank dies or sends another shape, all ranks fail and none hangs.

Two processes, with a process-group timeout of a few seconds. On a GPU the watchdog of NCCL ends
processes that wait.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.job_server import JobServer

TIMEOUT, MARGIN = 8, 30

RANK = """
import os, signal, sys
from datetime import timedelta
from absorbed_mla.cpu_host import enable_cpu_host
enable_cpu_host()
import torch, torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from absorbed_mla.context_parallel import strategy
from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention

fault, cp_comm_type, timeout = sys.argv[1], sys.argv[2], timedelta(seconds=int(sys.argv[3]))
dist.init_process_group("gloo", timeout=timeout)
parallel_state.initialize_model_parallel(
    context_parallel_size=2, distributed_timeout_minutes=timeout.total_seconds() / 60
)
tensor_parallel.model_parallel_cuda_manual_seed(1)
faulty = dist.get_rank() == 1

def die():
    if faulty:
        os.kill(os.getpid(), signal.SIGKILL)

if fault == "unseen_shape":
    # As on a GPU, which compares only new layouts before communication.
    strategy.require_equal_shapes = lambda *args: None
attention = build_attention(TINY, Setup(cp_comm_type=cp_comm_type))
x = torch.randn(8, 1, TINY.hidden, dtype=torch.float64, requires_grad=True)
attention(x, None)[0].sum().backward()
print("started", flush=True)
try:
    if fault == "forward":
        die()
    if fault == "unseen_shape" and faulty:
        x = x[:4]
    output, _ = attention(x, None)
    if fault == "backward":
        die()
    output.sum().backward()
    # Data that a rank has sent may be lost if it exits before the other rank has received it.
    dist.barrier()
except Exception as error:
    print("error:", error, flush=True)
    # Exit handlers would wait for the other rank.
    os._exit(3)
"""


@pytest.fixture
def outcome(server: JobServer, tmp_path: Path) -> Callable[..., tuple[list[int], list[str]]]:
    """Exit codes and outputs of both processes; fails if they do not end in time."""

    def run(fault: str, cp_comm_type: str) -> tuple[list[int], list[str]]:
        script = tmp_path / "rank.py"
        script.write_text(RANK)
        seconds = TIMEOUT + MARGIN
        codes, outputs, errors = server.run(
            [script, fault, cp_comm_type, TIMEOUT], tmp_path, 2, timeout=seconds, grace=seconds
        )
        assert None not in codes, [outputs, errors]
        # The forward and backward before the fault worked.
        assert all("started" in output for output in outputs), [outputs, errors]
        return codes, outputs

    return run


@pytest.mark.parametrize(
    ("fault", "cp_comm_type"),
    [
        ("forward", "all_gather"),
        ("backward", "p2p"),
        ("unseen_shape", "all_gather"),
        ("unseen_shape", "p2p"),
        ("none", "p2p"),
    ],
)
def test_both_ranks_end(outcome, fault, cp_comm_type):
    """One dies, or sends another shape; without a fault the same processes end well."""
    codes, outputs = outcome(fault, cp_comm_type)
    if fault == "none":
        assert codes == [0, 0], outputs
    else:
        assert 0 not in codes, outputs
        assert fault == "unseen_shape" or codes[1] == -9
