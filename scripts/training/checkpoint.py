"""Distributed checkpoints of a training run, and starting from one."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import nn

from absorbed_mla.distributed_checkpoint import load_model_weights, model_sharded_state_dict
from training import checkpoint_folder, distributed
from training.checkpoint_args import checkpoint_args
from training.model import unwrap
from training.optimizer import Optimizer
from training.presets import ModelPreset
from training.rng import restore_rng, rng_entry

# Of the command line, what must not change for a resumed run to continue the interrupted one.
_RUN_OPTIONS = ("attention", "seed", "seq_length", "global_batch_size", "packed", "split_percent")
# Of the model, what may: execution and initialisation, not the function that is trained.
_FREE_MODEL_FIELDS = {"max_position_embeddings"}


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
        self._run = {name: getattr(args, name) for name in _RUN_OPTIONS}
        self._run["data"] = data_fingerprint
        model_fields = dataclasses.asdict(preset)
        model_fields["moe_layer_freq"] = list(preset.moe_layer_freq)
        self._model_args = checkpoint_args(args, preset)
        self._run |= {k: v for k, v in model_fields.items() if k not in _FREE_MODEL_FIELDS}

    def save(self, iteration: int) -> None:
        """Write a checkpoint after ``iteration`` iterations; collective over all ranks."""
        folder = Path(self._args.save)
        path = checkpoint_folder.begin(folder, iteration) if dist.get_rank() == 0 else None
        path = _from_rank_0(str(path))
        state = self._state(is_loading=False)
        # What Megatron's tools expect of a checkpoint.
        state |= {"args": self._model_args, "iteration": iteration, "checkpoint_version": 3.0}
        state["training"] = {
            "iteration": iteration,
            "world_size": dist.get_world_size(),
            "run": self._run,
        }
        strategy = TorchDistSaveShardedStrategy(thread_count=1)
        dist_checkpointing.save(state, path, strategy)
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
        path = find_checkpoint(self._args.load)
        try:
            return self._load(path)
        except CheckpointingException as error:
            raise ValueError(f"--load: {path} cannot be read: {error}") from error

    def _load(self, path: Path) -> int:
        common = dist_checkpointing.load_common_state_dict(str(path))
        training = common.get("training")
        # A release belongs to no run; neither need a checkpoint that is named itself.
        release = path.name == checkpoint_folder.RELEASE
        named = training is None and path == Path(self._args.load)
        if self._args.finetune or release or named:
            load_model_weights(self._model, path)
            return 0
        if training is None:
            raise ValueError(
                f"--load: {path} was not written by this script, so it cannot be resumed; "
                "--finetune takes its weights"
            )
        self._check_same_run(training["run"], path)
        self._resume(path, training)
        return training["iteration"]

    def _resume(self, path: Path, training: dict) -> None:
        state = self._state(is_loading=True)
        same_world = training["world_size"] == dist.get_world_size()
        if not same_world:
            state.pop("rng")
        loaded = dist_checkpointing.load(state, str(path))
        self._model.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        if same_world:
            restore_rng(loaded["rng"])
        else:
            # There is no state for these ranks; dropout goes on with new numbers.
            distributed.seed(self._args.seed + training["iteration"])

    def _state(self, is_loading: bool) -> dict:
        model_state = model_sharded_state_dict(self._model)
        return {
            "model": model_state,
            "optimizer": self._optimizer.sharded_state_dict(model_state, is_loading),
            "rng": rng_entry(),
        }

    def _check_same_run(self, saved: dict, path: Path) -> None:
        for name, here in self._run.items():
            there = saved.get(name)
            if isinstance(there, tuple):
                there = list(there)
            if there != here:
                what = "the data" if name == "data" else "--" + name.replace("_", "-")
                values = "" if name == "data" else f": {there!r} there, {here!r} here"
                raise ValueError(
                    f"--load: {what} differs from the run in {path}{values}. To resume, use the "
                    "same; --finetune takes the weights only and starts anew"
                )


def find_checkpoint(folder: str) -> Path:
    """The checkpoint to load from ``folder``: the latest of a run, or the folder itself.

    Raises:
        ValueError: If there is none.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"--load: there is no folder {folder}")
    path = root
    iteration = checkpoint_folder.latest_iteration(root)
    if iteration is not None:
        checkpoint_folder.recover(root, iteration)
        path = checkpoint_folder.checkpoint_path(root, iteration)
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ValueError(f"--load: there is no distributed checkpoint in {path} (no metadata.json)")
    return path


def load_model_args(folder: str) -> argparse.Namespace:
    """The arguments that the checkpoint in ``folder`` carries about its model.

    Raises:
        ValueError: If there is no checkpoint, or it carries none.
    """
    path = find_checkpoint(folder)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except CheckpointingException as error:
        raise ValueError(f"--load: {path} cannot be read: {error}") from error
    args = common.get("args")
    if not isinstance(args, argparse.Namespace):
        raise ValueError(
            f"--use-checkpoint-args: {path} carries no arguments; describe the model by --preset "
            "and the options for single sizes"
        )
    return args


def _from_rank_0(value: str) -> str:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
