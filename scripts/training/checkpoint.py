"""Distributed checkpoints of a training run: saving, and restoring all of its state.

Megatron's dist_checkpointing writes and reads them. The states of random number generators are
gathered here because Megatron's code for it is in megatron.training, which needs Python 3.12.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import nn

from absorbed_mla.checkpoint.distributed import load_model_weights, model_sharded_state_dict
from training import checkpoint_folder, distributed
from training.checkpoint_args import checkpoint_args
from training.model import unwrap
from training.optimizer import Optimizer
from training.presets import ModelPreset
from training.start import read_start, require_same_run, run_options


class Checkpointer:
    """Saves and restores one run.

    Args:
        args: The command line.
        preset: The model's dimensions.
        model: Wrapped by Megatron's DDP.
        optimizer: Its optimizer.
        data_fingerprint: Of the tokens.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        preset: ModelPreset,
        model: nn.Module,
        optimizer: Optimizer,
        data_fingerprint: str,
    ) -> None:
        self._args = args
        self._model = unwrap(model)
        self._optimizer = optimizer
        self._run = run_options(args, preset, data_fingerprint)
        self._model_args = checkpoint_args(args, preset)

    def save(self, iteration: int) -> None:
        """Write a checkpoint after ``iteration`` iterations; collective over all ranks."""
        folder = Path(self._args.save)
        if dist.get_rank() == 0:
            checkpoint_folder.begin(folder, iteration)
        dist.barrier()
        path = checkpoint_folder.unfinished_path(folder, iteration)
        state = self._state(is_loading=False)
        # What Megatron's tools expect of a checkpoint.
        state |= {"args": self._model_args, "iteration": iteration, "checkpoint_version": 3.0}
        state["training"] = {
            "iteration": iteration,
            "world_size": dist.get_world_size(),
            "run": self._run,
        }
        strategy = TorchDistSaveShardedStrategy(thread_count=1)
        dist_checkpointing.save(state, str(path), strategy)
        dist.barrier()
        if dist.get_rank() == 0:
            checkpoint_folder.complete(folder, iteration)
        dist.barrier()

    def load(self) -> int:
        """Do what ``--load`` and ``--finetune`` say; collective over all ranks.

        Returns:
            The number of iterations already done.

        Raises:
            ValueError: If there is no checkpoint, or it does not fit this run.
        """
        start = read_start(self._args.load, finetune=self._args.finetune)
        try:
            if start.resumed is None:
                load_model_weights(self._model, start.path)
                self._optimizer.weights_were_loaded()
                return 0
            require_same_run(start, self._run)
            self._resume(start.path, start.resumed)
        except CheckpointingException as error:
            raise ValueError(f"--load: {start.path} cannot be read: {error}") from error
        return start.resumed["iteration"]

    def _resume(self, path: Path, training: dict) -> None:
        # Adam's state comes with the first step, so a run saved before that has none.
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
            # There is no state for these ranks; dropout goes on with new numbers.
            distributed.seed(self._args.seed + training["iteration"])

    def _state(self, is_loading: bool) -> dict:
        model_state = model_sharded_state_dict(self._model)
        return {
            "model": model_state,
            "optimizer": self._optimizer.sharded_state_dict(model_state, is_loading),
            "rng": _rng_entry(),
        }


def _rng_entry() -> ShardedObject:
    """The states of this rank's generators, which dropout draws from."""
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
