"""Save a run as a distributed checkpoint, and restore it.

Megatron's dist_checkpointing writes and reads checkpoints. The states of random number generators
are collected here because Megatron does it in megatron.training, which needs Python 3.12.
"""

from __future__ import annotations

import argparse
import queue
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from torch import nn

from absorbed_mla.checkpoint.distributed import load_model_weights, model_sharded_state_dict
from absorbed_mla.dsa.warm_up import INDEXER
from training import checkpoint_folder, distributed
from training.checkpoint_args import checkpoint_args
from training.model import unwrap
from training.optimizer import Optimizer
from training.presets import ModelPreset
from training.start import Start, run_options
from training.write_errors import write_errors


def load_weights(gpt: GPTModel, folder: str) -> None:
    """Load the weights of the checkpoint in ``folder``, or of the latest one there; collective.

    Raises:
        ValueError: If there is none, or it does not hold this model.
    """
    path = checkpoint_folder.find_checkpoint(folder)
    try:
        load_model_weights(gpt, path)
    except CheckpointingException as error:
        raise ValueError(f"--load: {path} cannot be read: {error}") from error


class Checkpointer:
    """Saves and restores one run.

    Args:
        args: The command line.
        preset: The model's dimensions.
        model: Wrapped by Megatron's DDP.
        optimizer: Its optimizer.
        data_fingerprint: Hash of the tokens, which must not change when the run is resumed.
        vocab_size: The vocabulary without padding.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        preset: ModelPreset,
        model: nn.Module,
        optimizer: Optimizer,
        data_fingerprint: str,
        vocab_size: int,
    ) -> None:
        self._args = args
        self._model = unwrap(model)
        self._optimizer = optimizer
        self._run = run_options(args, preset, data_fingerprint)
        self._model_args = checkpoint_args(args, preset, vocab_size)

    def save(self, iteration: int) -> None:
        """Write a checkpoint after ``iteration`` iterations; collective over all ranks.

        Raises:
            OSError: If it cannot be written, as on a full disk; former ones stay as they are.
        """
        with write_errors(Path(self._args.save), iteration):
            self._write(Path(self._args.save), iteration)

    def _write(self, folder: Path, iteration: int) -> None:
        if dist.get_rank() == 0:
            checkpoint_folder.begin(folder, iteration)
        dist.barrier()
        path = checkpoint_folder.unfinished_path(folder, iteration)
        state = self._state(is_loading=False)
        # Entries that Megatron's tools expect in a checkpoint.
        state |= {"args": self._model_args, "iteration": iteration, "checkpoint_version": 3.0}
        state["training"] = {
            "iteration": iteration,
            "world_size": dist.get_world_size(),
            "run": self._run,
        }
        _write_in_this_process()
        strategy = TorchDistSaveShardedStrategy(thread_count=1)
        dist_checkpointing.save(state, str(path), strategy)
        dist.barrier()
        if dist.get_rank() == 0:
            checkpoint_folder.complete(folder, iteration)
        dist.barrier()

    def load(self, start: Start) -> int:
        """Load the weights of a checkpoint or resume its run; collective over all ranks.

        Returns:
            The number of iterations already done.

        Raises:
            ValueError: If the checkpoint does not fit this model.
        """
        try:
            if start.resumed is None:
                initial = (INDEXER,) if self._args.new_indexer else ()
                load_model_weights(self._model, start.path, initial=initial)
                self._optimizer.weights_were_loaded()
                return 0
            self._resume(start.path, start.resumed)
        except CheckpointingException as error:
            raise ValueError(f"--load: {start.path} cannot be read: {error}") from error
        return start.resumed["iteration"]

    def _resume(self, path: Path, training: dict) -> None:
        # Adam's state is created by the first step: a run saved before it has none.
        state = self._state(is_loading=training["iteration"] > 0)
        same_world = training["world_size"] == dist.get_world_size()
        if not same_world:
            state.pop("rng")
        loaded = dist_checkpointing.load(state, str(path))
        self._model.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        if same_world:
            _restore_rng(loaded["rng"])
        else:
            # States of other ranks do not fit; dropout continues with new random numbers.
            distributed.seed(self._args.seed + training["iteration"])

    def _state(self, is_loading: bool) -> dict:
        model_state = model_sharded_state_dict(self._model)
        return {
            "model": model_state,
            "optimizer": self._optimizer.sharded_state_dict(model_state, is_loading),
            "rng": _rng_entry(),
        }


def _rng_entry() -> ShardedObject:
    """The states of this rank's random number generators, which dropout uses."""
    states = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    return ShardedObject("rng_state", states, (dist.get_world_size(),), (dist.get_rank(),))


def _restore_rng(states: dict) -> None:
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def _write_in_this_process() -> None:
    """Have no process started that passes on what was written.

    Megatron starts one on every rank, for writers in processes of their own, which are not used
    here. It imports PyTorch and Megatron: five seconds of a core before the first checkpoint.
    """
    if getattr(filesystem_async, "_results_queue", False) is None:
        filesystem_async._results_queue = queue.SimpleQueue()
