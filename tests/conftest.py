"""Processes, seeds and hostile defaults for every test."""

import gc
import os
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

# What is imported and collected stays; looking for garbage among it takes a third of the time.
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402

# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"megatron\..*")

from tests.support import line_probes  # noqa: E402

line_probes.start()

from absorbed_mla.cpu_host import enable_cpu_host  # noqa: E402

enable_cpu_host()
# Of kinds of devices that are not there torch.manual_seed keeps each seed for later, with the stack
# of its call: a millisecond for every test.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():
        _kind.manual_seed_all = lambda seed: None
# Deterministic mode asks for it where there is a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from absorbed_mla.batch_invariant import parts  # noqa: E402
from absorbed_mla.batch_invariant.mode import (  # noqa: E402
    disable_batch_invariant_mode,
    is_enabled,
)
from tests.support import report, world  # noqa: E402
from tests.support.auxiliary_losses import forget_auxiliary_losses  # noqa: E402
from tests.support.environment import launcher_variables  # noqa: E402
from tests.support.error_table import ErrorTable  # noqa: E402
from tests.support.forked_python import ForkedPopen, fork_server  # noqa: E402

# Torchrun's, of the tests themselves.
_VARIABLES: dict[str, str] = {}
_TABLE = pytest.StashKey[ErrorTable]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    folder = cache.mkdir("absorbed_mla_errors") if cache else Path(tempfile.gettempdir())
    config.stash[_TABLE] = ErrorTable(folder / "errors.jsonl")
    if world.rank():
        report.only_failures(config)
    else:
        report.record(config)
    # Under torchrun every process would otherwise take all cores.
    if world.size() > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What is imported and collected stays: collections from here on need not visit it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    line_probes.write()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    table = config.stash[_TABLE]
    if table.rows:
        terminalreporter.section(f"worst errors against the oracle, {world.size()} processes")
        for line in table.summary():
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"every combination: {table.path}")


@pytest.fixture(scope="session", autouse=True)
def _processes():
    """One process group for the session; tests take what they need from ``world``."""
    world.start()
    _VARIABLES.update(launcher_variables())
    yield
    world.stop()


@pytest.fixture(scope="session", autouse=True)
def _poisoned_memory():
    """Fill torch.empty with NaN (a side effect of deterministic mode), so that reading it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_former_losses() -> None:
    """What Megatron keeps of the last model's losses: their scale, and sums to be logged."""
    forget_auxiliary_losses()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """The process is after a test as before it, when fixtures of its module were set up already.

    A batch-invariant mode that is left would change what other tests compute.
    """
    mode = _mode()
    determinism = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(determinism, warn_only=only_warned)
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    # Scripts make a rank of their process, also where a fixture of a module runs them.
    for name in launcher_variables():
        del os.environ[name]
    os.environ.update(_VARIABLES)
    if (left := _mode()) != mode:
        disable_batch_invariant_mode()
        pytest.fail(f"a test left the batch-invariant mode, tensor_parallel_parts: {left}")


def _mode() -> tuple[bool, int | None]:
    return is_enabled(world.device()), parts.fixed.count


@pytest.fixture
def _on_the_device():
    """Tensors that a test makes are on this process's device."""
    with torch.device(world.device()):
        yield


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Without a GPU Triton's kernels run in its interpreter."""
    from tests.support.backends import triton_interpreter

    with triton_interpreter():
        yield


@pytest.fixture(scope="session")
def error_table(pytestconfig: pytest.Config) -> ErrorTable:
    """Where grid tests record their worst errors."""
    return pytestconfig.stash[_TABLE]


@pytest.fixture(scope="session")
def _fork_server() -> None:
    """Started before a test looks at the children of its process."""
    if not torch.cuda.is_available():
        fork_server()


@pytest.fixture
def forked_python(_fork_server, monkeypatch) -> None:
    """Python programs that a test starts are forked; PyTorch and Megatron are imported already."""
    if not torch.cuda.is_available():
        # Not by forks_python: a test that patches it, too, would give ForkedPopen back afterwards.
        monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
