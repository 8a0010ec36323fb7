"""Run Megatron-Core on a machine without a GPU.

Megatron-Core asks ``torch.cuda`` for the device, the random-number state and streams in many places
that have nothing to do with a kernel. :func:`enable_cpu_host` replaces those functions by ones for
the CPU. It does nothing where CUDA is available, so one program serves both kinds of machine.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib
import logging
from collections.abc import Callable

import torch

from absorbed_mla.log_once import log_once
from absorbed_mla.megatron_names import (
    CPU_HOST,
    GET_RNG_STATE,
    IS_CUDA,
    MOVE_COUNTS,
    SET_RNG_STATE,
    SHARE_STORAGE,
    MegatronName,
)

logger = logging.getLogger(__name__)

_ENABLED = False
# Tensor factories that Megatron calls with pin_memory=True or device="cuda".
_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "empty_like")


class _NoStream:
    """Replaces a CUDA stream or event: every wait is over already."""

    device_index = 0
    device_type = 1
    stream_id = 0

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None

    def record_event(self, event: object = None) -> _NoStream:
        """An event, for which Megatron's all-to-all dispatcher waits."""
        return _NoStream()

    def elapsed_time(self, other: object) -> float:
        """0 ms, because nothing is measured."""
        return 0.0


def enable_cpu_host() -> bool:
    """Replace the ``torch.cuda`` functions that Megatron-Core calls, once per process.

    Returns:
        True if the process now runs on the CPU, False if a GPU is there and nothing was changed.
    """
    global _ENABLED
    if torch.cuda.is_available():
        return False
    if not _ENABLED:
        _import_uncompiled()
        _replace_cuda_functions()
        _replace_functions_of_megatron()
        _ENABLED = True
    return True


def _import_uncompiled() -> None:
    """Import Megatron without the compiler for its small functions, where it is not yet imported.

    Nothing is compiled here, and PyTorch's compiler takes as long to import as Megatron.
    """
    compiled, torch.compile = torch.compile, _as_it_is
    try:
        for name in ("megatron.core.jit", "megatron.core.transformer.moe.router"):
            importlib.import_module(name)
    finally:
        torch.compile = compiled


def _as_it_is(model=None, **_):
    """``torch.compile`` that compiles nothing."""
    return (lambda function: function) if model is None else model


def _replace_cuda_functions() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.current_stream = lambda device=None: _NoStream()
    torch.cuda.Stream = _NoStream
    torch.cuda.Event = _NoStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.memory_stats = lambda device=None: collections.defaultdict(int)
    torch.cuda.nvtx._nvtx = _NoStream()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.type = _type_on_a_gpu(torch.Tensor.type)
    # "with torch.device(...)" looks the factories up at its first use, so that must come before.
    with torch.device("cpu"):
        torch.empty(0)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _type_on_a_gpu(method):
    """``Tensor.type`` with the name of the type on a GPU, which Megatron's optimizers require."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        found = method(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return call


def _on_cpu(function):
    """A tensor factory that ignores ``pin_memory`` and takes ``device="cuda"`` for the CPU."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def _replace_functions_of_megatron() -> None:
    _replace(GET_RNG_STATE, lambda *args, **kwargs: torch.get_rng_state())
    _replace(SET_RNG_STATE, lambda state, *args, **kwargs: torch.set_rng_state(state))
    # It would call the C++ compiler, as would torch.compile of small functions, which also fails
    # in folders with a space in their name.
    _replace(SHARE_STORAGE, lambda: _copy_storage)
    torch.compiler.set_stance("force_eager")
    # What pipeline stages broadcast while they generate.
    _replace(IS_CUDA, lambda tensor: None)
    # How many tokens the all-to-all dispatcher sends to each rank of experts.
    _replace(MOVE_COUNTS, _counts_on_cpu)


def _replace(name: MegatronName, function: Callable) -> None:
    """Replace a function of Megatron's, if this release has it."""
    module = importlib.import_module(name.owner)
    if missing := name.missing_in(module):
        log_once(logger, f"{CPU_HOST.what} replaces no {name.name}", missing)
    else:
        name.replace(module, function)


def _counts_on_cpu(counts, as_numpy: bool = False, record_stream: bool = False):
    return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts


def _copy_storage(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy ``src``'s bytes to ``dst``'s storage below autograd; Megatron would share them."""
    target, source = dst.untyped_storage(), src.untyped_storage()
    target.resize_(source.nbytes())
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes())
