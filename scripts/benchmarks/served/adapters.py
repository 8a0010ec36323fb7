"""Adapters of random values in PEFT's format, for a checkpoint's attentions."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 16


def write_adapters(model: Path, folder: Path, count: int, alpha: float = RANK) -> list[Path]:
    """Folders of ``count`` adapters of rank ``RANK`` on every linear layer of the attentions."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.synthetic import stored_tensors

    config = json.loads((model / "config.json").read_text())
    layers = {
        one.name.removesuffix(".weight"): one.shape
        for one in stored_tensors(config)
        if ".self_attn." in one.name and one.name.endswith(("proj.weight", "with_mqa.weight"))
    }
    made = []
    for seed in range(count):
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for name, (outputs, inputs) in layers.items():
            for factor, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                values = torch.randn(shape, generator=generator) / 100
                tensors[f"base_model.model.{name}.lora_{factor}.weight"] = values.bfloat16()
        made.append(folder / str(seed))
        made[-1].mkdir()
        save_file(tensors, made[-1] / "adapter_model.safetensors")
        adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha}
        (made[-1] / "adapter_config.json").write_text(json.dumps(adapter))
    return made
