"""What a Megatron of the folder on PYTHONPATH computes with a checkpoint that its loader reads.

A program of its own, because one process imports one Megatron:

    PYTHONPATH=OLD_MEGATRON:REPOSITORY python -m tests.old_megatron.predict CHECKPOINT TOKENS LOGITS
"""

import json
import sys
from pathlib import Path

import torch

from absorbed_mla.cpu_host import enable_cpu_host

enable_cpu_host()

import megatron.core  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.validation import StrictHandling  # noqa: E402

from checkpoint_conversion.checkpoint_folder import weights_folder  # noqa: E402
from checkpoint_conversion.formats import open_checkpoint  # noqa: E402
from checkpoint_conversion.logits import megatron_logits, megatron_model, one_process  # noqa: E402


def main(folder: Path, tokens: Path, logits: Path) -> None:
    """Load by Megatron alone, compute, and say on stdout what the loader found."""
    config = open_checkpoint(folder).config
    with one_process():
        model = megatron_model(config, "standard")
        # As Megatron's own load_checkpoint asks for layers.
        inner = str(weights_folder(folder))
        common = dist_checkpointing.load_common_state_dict(inner)
        asked = {"model": model.sharded_state_dict(metadata=common["content_metadata"])}
        loaded, not_asked_for, not_found = dist_checkpointing.load(
            asked, inner, strict=StrictHandling.RETURN_ALL
        )
        model.load_state_dict(loaded["model"], strict=True)
        torch.save(megatron_logits(model, torch.load(tokens)), logits)
    report = {
        "version": megatron.core.__version__,
        "kv_lora_rank": common["args"].kv_lora_rank,
        "not asked for": sorted(not_asked_for),
        "not found": sorted(not_found),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
