"""Megatron's training loop, ``megatron.training``, on CPUs too, and what we put into its places.

:func:`pretrain` replaces functions by which Megatron's module ``training`` logs, saves and clips.
Every other module of this package imports from ``megatron.training`` after this one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import typing
from collections.abc import Callable, Iterator

if not hasattr(typing, "override"):
    # Python 3.12's; all else of megatron.training runs on 3.11.
    typing.override = lambda method: method  # type: ignore[attr-defined]

import numpy as np
import torch

from absorbed_mla.cpu_host import enable_cpu_host

ON_CPU = enable_cpu_host()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.datasets import helpers_cpp  # noqa: E402, F401
from megatron.core.datasets import utils as dataset_utils  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    destroy_num_microbatches_calculator,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.rerun_state_machine import destroy_rerun_state_machine  # noqa: E402
from megatron.training import arguments, global_vars, training  # noqa: E402
from megatron.training import get_args as get_args  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args as gpt_config_from_args,
)
from megatron.training.argument_utils import pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402

_HOST_DATA_ITERATORS = training.build_train_valid_test_data_iterators
_HOST_SET_UP = training.setup_model_and_optimizer


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    """Megatron's own; what it prints meanwhile is no result of a command."""
    with quiet():
        arguments.add_megatron_arguments(parser)


def validate_args(args: argparse.Namespace) -> None:
    """Megatron's own checks, and the arguments that it derives.

    Raises:
        ValueError: If Megatron refuses the options.
    """
    hopper = [(arguments, "get_device_arch_version", lambda: 9)] if ON_CPU else []
    try:
        with _replaced(hopper), quiet():
            arguments.validate_args(args, {})
    except AssertionError as error:
        raise ValueError(f"Megatron refuses these options: {error}") from error


def initialize(args: argparse.Namespace) -> torch.device:
    """Join the process group and Megatron's groups, and seed all generators, for other loops.

    Args:
        args: A command line, checked.

    Returns:
        The device of this process.
    """
    with _host(args):
        _initialize()
    return torch.device(torch.cuda.current_device())


def set_up(args: argparse.Namespace, model_config: object) -> tuple:
    """Megatron's model, wrapped, its optimizer and scheduler, for other loops; collective.

    Args:
        args: The command line of :func:`initialize`.
        model_config: Megatron's config of the whole model.
    """
    config = pretrain_cfg_container_from_args(args, model_config)
    with _host(args):
        [model], optimizer, scheduler = _set_up(
            ModelType.encoder_or_decoder,
            cfg_container=config,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    return model, optimizer, scheduler


def seed(value: int) -> None:
    """Seed all generators as :func:`initialize` does."""
    value += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    tensor_parallel.model_parallel_cuda_manual_seed(value)


def finish() -> None:
    """Destroy all process groups, and what Megatron keeps of a run."""
    training.destroy_global_state()
    torch.distributed.destroy_process_group()


def pretrain(
    args: argparse.Namespace,
    model_config: object,
    datasets: Callable,
    forward_step: Callable,
    **places: Callable,
) -> None:
    """Run Megatron's loop, whose prints nobody sees.

    Args:
        args: The command line, checked.
        model_config: Megatron's config of the whole model.
        datasets: Called with the numbers of samples; returns those of training, validation, test.
        forward_step: Of a microbatch.
        places: Functions by the names of those of ``megatron.training.training`` in whose places
            they are called.
    """
    datasets.is_distributed = True  # every rank reads its own
    config = pretrain_cfg_container_from_args(args, model_config)
    with _host(args, **places):
        try:
            training.pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
        except SystemExit as end:
            # Megatron ends with 0 at --exit-interval, and with None where it cannot go on.
            if end.code != 0:
                raise RuntimeError(f"Megatron left its loop with {end.code!r}") from end


@contextlib.contextmanager
def _host(args: argparse.Namespace, **places: Callable) -> Iterator[None]:
    """Megatron with these arguments; it compiles nothing, prints nothing, and needs no GPU."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    places |= {
        "build_train_valid_test_data_iterators": _data_iterators,
        "initialize_megatron": _initialize,
        "setup_model_and_optimizer": _set_up,
    }
    if ON_CPU:
        places["set_jit_fusion_options"] = places["report_memory"] = _nothing
    replaced = [(training, name, function) for name, function in places.items()]
    # The wheel brings the datasets' helpers compiled, and no Makefile.
    replaced.append((dataset_utils, "compile_helpers", _nothing))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(replaced))
        stack.enter_context(quiet())
        # Of a run before this one in the same process.
        global_vars.destroy_global_vars()
        destroy_num_microbatches_calculator()
        destroy_rerun_state_machine()
        global_vars.set_global_variables(args, build_tokenizer=False)
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let nobody see what is printed."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _replaced(replaced: list[tuple]) -> Iterator[None]:
    """Give objects other attributes: owner, name, value."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _nothing(*args: object, **options: object) -> None:
    pass


def _initialize(**options: object) -> None:
    """Megatron's, which refuses to run without a GPU."""
    one_gpu = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
    ]
    with _replaced(one_gpu if ON_CPU else []):
        initialize_megatron(**options)


def _set_up(*arguments: object, **options: object) -> tuple:
    """Megatron's, whose refusals are mistakes in the command line."""
    try:
        return _HOST_SET_UP(*arguments, **options)
    except (AssertionError, ImportError) as error:
        if not str(error):
            raise
        raise ValueError(f"Megatron refuses these options: {error}") from error


def _data_iterators(datasets: Callable) -> tuple:
    """Megatron's, without a draw of random numbers, which a resumed run has drawn already."""
    with torch.random.fork_rng(devices=()):
        return _HOST_DATA_ITERATORS(datasets)
