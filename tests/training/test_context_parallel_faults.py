"""A context-parallel rank that dies, or sends something else: an error everywhere, never a hang.

Two processes each time, with a process-group timeout of a few seconds. On a GPU the same waits end
in NCCL's watchdog, which ends the process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT, MARGIN = 8, 30

RANK = """
import os, signal, sys
from datetime import timedelta
from absorbed_mla.testing.cpu_host import enable_cpu_host
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
    # As where known shapes are not compared again.
    strategy.require_agreement = lambda *args: None
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
    # What a rank sent may be gone before the other one is.
    dist.barrier()
except Exception as error:
    print("error:", error, flush=True)
    # Not the ordinary way out, which would wait for the others.
    os._exit(3)
"""


def start(rank: int, port: int, fault: str, cp_comm_type: str) -> subprocess.Popen:
    """One of the two processes, which meet at the port."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("TORCHELASTIC_RUN_ID", None)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", RANK, fault, cp_comm_type, str(TIMEOUT)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def outcome(fault: str, cp_comm_type: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of both processes; fails if they do not end in time."""
    port = free_port()
    processes = [start(rank, port, fault, cp_comm_type) for rank in range(2)]
    try:
        outputs = [p.communicate(timeout=TIMEOUT + MARGIN)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    # Before the fault everything went well.
    assert all("started" in output for output in outputs), outputs
    return [p.returncode for p in processes], outputs


@pytest.mark.parametrize("fault, cp_comm_type", [("forward", "all_gather"), ("backward", "p2p")])
def test_a_rank_dies(fault, cp_comm_type):
    (survivor, dead), outputs = outcome(fault, cp_comm_type)
    assert dead == -9
    assert survivor != 0, outputs[0]


@pytest.mark.parametrize("cp_comm_type", ["all_gather", "p2p"])
def test_a_rank_sends_another_shape(cp_comm_type):
    codes, outputs = outcome("unseen_shape", cp_comm_type)
    assert 0 not in codes, outputs


def test_without_a_fault():
    """The same processes end well otherwise."""
    codes, outputs = outcome("none", "p2p")
    assert codes == [0, 0], outputs
