"""LoRA (arXiv:2106.09685) on every linear layer of the attention, up-projections included.

    config.py       which layers, of what rank
    targets.py      the layers by their names here and in Hugging Face's models
    low_rank.py     the two matrices of one layer, and the product with its input
    forms.py        K-up and V-up in both forms of the attention, which stay what they are
    adapter.py      the matrices of one attention
    model.py        put on, merge, unmerge
    peft_format.py  adapter_config.json and adapter_model.safetensors
    sharded.py      the adapters alone as a distributed checkpoint

Public names are imported on first use: command lines read ``config.py`` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from absorbed_mla.lora.config import LoRAConfig
    from absorbed_mla.lora.model import add_lora, merge_lora, remove_lora, unmerge_lora
    from absorbed_mla.lora.peft_format import load_peft_adapter, save_peft_adapter
    from absorbed_mla.lora.request import LoRARequest

_MODULES = {
    "LoRAConfig": "config",
    "LoRARequest": "request",
    **dict.fromkeys(("add_lora", "merge_lora", "remove_lora", "unmerge_lora"), "model"),
    **dict.fromkeys(("load_peft_adapter", "save_peft_adapter"), "peft_format"),
}
__all__ = [
    "LoRAConfig",
    "LoRARequest",
    "add_lora",
    "load_peft_adapter",
    "merge_lora",
    "remove_lora",
    "save_peft_adapter",
    "unmerge_lora",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
