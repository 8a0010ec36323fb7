"""The checkpoint that ``LLM`` is given: its headers, its tokenizer, whether ranks can share it.

Imports no Megatron: the ranks' processes start before their parent has it.
"""

from __future__ import annotations

import json
from pathlib import Path

from absorbed_mla.serving.llm_options import LLMOptions
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import Checkpoint


def open_model(folder: Path, *, follow_links: bool = False) -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        folder: Of the checkpoint.
        follow_links: Whether links in it may lead anywhere.

    Raises:
        ValueError: If there is no checkpoint that can be read.
    """
    if not folder.exists():
        raise ValueError(
            f"model must be a folder with a checkpoint, and there is no {folder} "
            "('hf download NAME --local-dir FOLDER' gets one from Hugging Face)"
        )
    return open_checkpoint(folder, follow_links=follow_links)


def tokenizer_folder(checkpoint: Checkpoint) -> Path | None:
    """Where the model's tokenizer is, if the checkpoint came with one."""
    # Not that of the files themselves: in a download cache they have other names.
    return checkpoint.auxiliary_folder if checkpoint.auxiliary else None


def end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Tokens that end the model's texts, by its generation_config.json and config.json."""
    found: list[int] = []
    path = checkpoint.auxiliary.get("generation_config.json")
    for fields in (json.loads(path.read_text()) if path else {}, checkpoint.config.hugging_face):
        value = fields.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))


def require_model(checkpoint: Checkpoint, options: LLMOptions) -> None:
    """Check that the ranks can share the model, and that it has what options ask for.

    Args:
        checkpoint: Of the model.
        options: With ``tensor_parallel_size`` set.

    Raises:
        ValueError: Naming the option that does not fit, and the model's size.
    """
    config, tp, ep = checkpoint.config, options.tensor_parallel_size, options.expert_parallel_size
    assert tp is not None
    shared = config.num_shared_experts * config.moe_ffn_hidden_size
    heads = 1 if options.data_parallel_attention else tp
    for name, size, parts in (
        ("attention heads", config.num_attention_heads, heads),
        ("MLP channels", config.ffn_hidden_size, tp),
        ("channels of shared experts", shared, tp),
        ("channels of an expert", config.moe_ffn_hidden_size, tp // ep),
    ):
        if size % parts:
            raise ValueError(
                f"tensor_parallel_size must divide the model's {size} {name}, got {tp}"
                + (f" with expert_parallel_size {ep}" if parts < tp else "")
            )
    if (config.num_experts or 0) % ep or (ep > 1 and not config.num_experts):
        raise ValueError(
            f"expert_parallel_size must divide the model's {config.num_experts or 0} experts, got "
            f"{ep}"
        )
    if options.pipeline_parallel_size > config.num_layers:
        raise ValueError(
            f"pipeline_parallel_size must be at most the model's {config.num_layers} layers, got "
            f"{options.pipeline_parallel_size}"
        )
    drafts = options.num_speculative_tokens
    if drafts and not config.mtp_layers:
        raise ValueError(
            f"num_speculative_tokens {drafts} needs a checkpoint with a multi-token-prediction "
            "(MTP) layer, and this one has none"
        )
