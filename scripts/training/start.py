"""The checkpoint of --load: what it contains, and whether this run may resume it."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException

from training.checkpoint_folder import RELEASE, find_checkpoint
from training.options_named import flag_of
from training.presets import ModelPreset

# Options that must not change when a run is resumed.
_RUN_OPTIONS = (
    *("attention", "seed", "seq_length", "global_batch_size", "packed", "split_percent"),
    "train_only",
)
# Fields of the model that may change, too.
_FREE_MODEL_FIELDS = {"max_position_embeddings"}
# Names in errors of what has no option of its name.
_FLAGS = {"split_percent": "--split", "data": "the data (--data, --tokenizer)"}


@dataclass(frozen=True)
class Start:
    """A checkpoint to start from.

    Attributes:
        path: Its folder.
        args: The arguments in it, which describe its model; None if it has none.
        resumed: Iteration, options and number of ranks of the run that saved it; None if only the
            weights are used.
    """

    path: Path
    args: argparse.Namespace | None
    resumed: dict | None


def read_start(folder: str, *, finetune: bool) -> Start:
    """Find a checkpoint, and read the description of its model and its run.

    Args:
        folder: Value of ``--load``.
        finetune: Whether only its weights are used.

    Raises:
        ValueError: If there is no checkpoint, it cannot be read, or its run cannot be resumed.
    """
    path = find_checkpoint(folder)
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except CheckpointingException as error:
        raise ValueError(f"--load: {path} cannot be read: {error}") from error
    args = common.get("args")
    if not isinstance(args, argparse.Namespace):
        args = None
    training = common.get("training")
    # A release has weights only; so may a checkpoint whose own folder is given.
    weights_only = path.name == RELEASE or (training is None and path == Path(folder))
    if finetune or weights_only:
        return Start(path, args, None)
    if training is None:
        raise ValueError(
            f"--load: {path} was not written by this script, so it cannot be resumed; "
            "--finetune takes its weights"
        )
    return Start(path, args, training)


def load_model_args(folder: str) -> argparse.Namespace:
    """The arguments that describe the model of the checkpoint in ``folder``.

    Raises:
        ValueError: If there is no checkpoint, or no arguments in it.
    """
    start = read_start(folder, finetune=True)
    if start.args is None:
        raise ValueError(
            f"--load: {start.path} contains no arguments that describe its model; describe it by "
            "--preset and the options for single sizes"
        )
    return start.args


def run_options(args: argparse.Namespace, preset: ModelPreset, data: str) -> dict:
    """The options of a run that must be the same when it is resumed.

    Args:
        args: The command line.
        preset: The model's dimensions.
        data: Fingerprint of the tokens.
    """
    model = dataclasses.asdict(preset)
    model["moe_layer_freq"] = list(preset.moe_layer_freq)
    free = _FREE_MODEL_FIELDS
    if preset.experimental_attention_variant is None:
        free = free | {name for name in model if name.startswith("dsa_")}
    options = {name: getattr(args, name) for name in _RUN_OPTIONS}
    return {
        **options,
        "data": data,
        **{name: value for name, value in model.items() if name not in free},
    }


def require_same_run(start: Start, here: dict) -> None:
    """Refuse to resume a run with other options than it had.

    Args:
        start: A checkpoint of that run.
        here: :func:`run_options` of this run.

    Raises:
        ValueError: Naming all options that differ, in one line.
    """
    assert start.resumed is not None
    there = start.resumed["run"]
    problems = []
    for name, value in here.items():
        saved = there.get(name)
        saved = list(saved) if isinstance(saved, tuple) else saved
        if saved != value:
            values = "" if name == "data" else f" {saved} there, {value} here"
            problems.append(f"{_FLAGS.get(name) or flag_of(name)}{values}")
    if problems:
        raise ValueError(
            f"--load: the run in {start.path} differs from this one: {'; '.join(problems)}. "
            "To resume, use the same; --finetune takes the weights only and starts anew"
        )
