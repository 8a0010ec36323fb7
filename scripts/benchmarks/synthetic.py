"""Hugging Face checkpoints of random values with the names and shapes of DeepSeek-V3's tensors.

Only the numbers of layers and experts are smaller, and the widths if wanted. Names are written down
from the released checkpoint, apart from ``checkpoint_conversion``'s own table, so that each can be
checked against the other. No two tensors of one shape are equal.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# fmt: off
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}
SCALED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
)
# fmt: on
# A prime, so that no row of a tensor repeats an earlier one at the same place.
BLOCK_VALUES = 4_194_301
STRIDE = 1_000_003
# Left free on the disk, for the index, headers and the file system's own.
MARGIN = 256 * 10**6


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which model."""

    layers: int  # decoder layers
    experts: int  # routed experts of each MoE layer, at least 2
    dense_layers: int = 1  # how many of the first layers are dense
    vocab_size: int | None = None  # None: DeepSeek-V3's, by scale_down
    scale_down: int = 1  # every width (not those of a head) is divided by this


class Stored(NamedTuple):
    """One tensor of the files."""

    name: str
    shape: tuple[int, ...]
    role: str  # what values are like: "weight", "norm" or "bias"

    @property
    def num_bytes(self) -> int:
        """Of its values, which are bfloat16 but for biases."""
        return math.prod(self.shape) * (4 if self.role == "bias" else 2)


def model_config(choice: Choice) -> dict[str, Any]:
    """The config.json.

    Raises:
        ValueError: If the scale does not divide a width, or there are too few experts.
    """
    odd = [f"{key} {CONFIG[key]}" for key in SCALED if CONFIG[key] % choice.scale_down]
    if odd:
        raise ValueError(f"--scale-down {choice.scale_down} does not divide {', '.join(odd)}")
    if choice.experts < 2:
        raise ValueError(f"--experts must be at least 2, got {choice.experts}")
    config = CONFIG | {key: CONFIG[key] // choice.scale_down for key in SCALED}
    config |= {"num_hidden_layers": choice.layers, "first_k_dense_replace": choice.dense_layers}
    config |= {"vocab_size": choice.vocab_size or config["vocab_size"]}
    # The router scores a group by its two best experts.
    divisors = (d for d in (8, 4, 2, 1) if choice.experts % d == 0 and choice.experts // d >= 2)
    config["n_routed_experts"], config["n_group"] = choice.experts, next(divisors)
    config["topk_group"] = min(config["topk_group"], config["n_group"])
    reachable = config["topk_group"] * choice.experts // config["n_group"]
    config["num_experts_per_tok"] = min(config["num_experts_per_tok"], reachable)
    return config


def stored_tensors(config: dict[str, Any]) -> Iterator[Stored]:
    """Every tensor of the files, in the order of the model."""
    hidden, vocab, heads = (
        config[key] for key in ("hidden_size", "vocab_size", "num_attention_heads")
    )
    rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    v, experts = config["v_head_dim"], config["n_routed_experts"]
    yield Stored("model.embed_tokens.weight", (vocab, hidden), "weight")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        yield Stored(f"{prefix}input_layernorm.weight", (hidden,), "norm")
        yield Stored(f"{attention}q_a_proj.weight", (rank, hidden), "weight")
        yield Stored(f"{attention}q_a_layernorm.weight", (rank,), "norm")
        yield Stored(f"{attention}q_b_proj.weight", (heads * (nope + rope), rank), "weight")
        yield Stored(f"{attention}kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), "weight")
        yield Stored(f"{attention}kv_a_layernorm.weight", (kv_rank,), "norm")
        yield Stored(f"{attention}kv_b_proj.weight", (heads * (nope + v), kv_rank), "weight")
        yield Stored(f"{attention}o_proj.weight", (hidden, heads * v), "weight")
        yield Stored(f"{prefix}post_attention_layernorm.weight", (hidden,), "norm")
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(mlp, hidden, config["intermediate_size"])
            continue
        yield Stored(f"{mlp}gate.weight", (experts, hidden), "weight")
        yield Stored(f"{mlp}gate.e_score_correction_bias", (experts,), "bias")
        width = config["moe_intermediate_size"]
        for expert in range(experts):
            yield from _mlp(f"{mlp}experts.{expert}.", hidden, width)
        yield from _mlp(f"{mlp}shared_experts.", hidden, width * config["n_shared_experts"])
    yield Stored("model.norm.weight", (hidden,), "norm")
    yield Stored("lm_head.weight", (vocab, hidden), "weight")


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[Stored]:
    yield Stored(f"{prefix}gate_proj.weight", (width, hidden), "weight")
    yield Stored(f"{prefix}up_proj.weight", (width, hidden), "weight")
    yield Stored(f"{prefix}down_proj.weight", (hidden, width), "weight")


def total_bytes(choice: Choice) -> int:
    """Of all values."""
    return sum(tensor.num_bytes for tensor in stored_tensors(model_config(choice)))


def require_room(option: str, folder: Path, num_bytes: float) -> None:
    """Check that the disk of a folder, which need not exist, has room.

    Raises:
        ValueError: If not.
    """
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < num_bytes + MARGIN:
        raise ValueError(
            f"{option} {folder} has {free / 1e9:.1f} GB free; {num_bytes / 1e9:.1f} GB needed"
        )


class Values:
    """One block of random values per role; each tensor starts at a place of its own in it.

    Args:
        tensors: All tensors, in order; tensor i starts at i * STRIDE.
    """

    def __init__(self, tensors: Iterable[Stored]) -> None:
        import torch

        self._start = {t.name: i * STRIDE % BLOCK_VALUES for i, t in enumerate(tensors)}
        normal = torch.randn(BLOCK_VALUES, generator=torch.Generator().manual_seed(0))
        self._blocks = {
            "weight": (0.02 * normal).bfloat16(),
            "norm": (1 + 0.02 * normal).bfloat16(),
            "bias": 0.1 * normal,
        }

    def make(self, tensor: Stored) -> Tensor:
        """The values of ``tensor``: the block again and again from the tensor's place on."""
        block = self._blocks[tensor.role]
        result = block.new_empty(math.prod(tensor.shape))
        position, written = self._start[tensor.name], 0
        while written < len(result):
            piece = block[position : position + len(result) - written]
            result[written : written + len(piece)] = piece
            written += len(piece)
            position = 0
        return result.view(tensor.shape)


def write(folder: Path, choice: Choice, shard_bytes: int = 4 * 10**9, processes: int = 1) -> None:
    """Write shards, index and config.json.

    Args:
        folder: Is created.
        choice: Which model.
        shard_bytes: Most bytes of a file, unless one tensor has more.
        processes: That write, each with one shard in memory; forked, before anything uses a GPU.
    """
    import torch

    config = model_config(choice)
    tensors = list(stored_tensors(config))
    shards: list[list[Stored]] = [[]]
    for tensor in tensors:
        used = sum(one.num_bytes for one in shards[-1])
        if shards[-1] and used + tensor.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    count = len(shards)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    folder.mkdir(parents=True)
    work = repeat(Values(tensors)), shards, [folder / name for name in names]
    if processes > 1:
        # Threads of PyTorch do not live on in a forked process.
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(processes, fork, torch.set_num_threads, (1,)) as pool:
            list(pool.map(_write_shard, *work))
    else:
        list(map(_write_shard, *work))
    weight_map = {tensor.name: name for name, shard in zip(names, shards) for tensor in shard}
    total = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
    index = {"metadata": total, "weight_map": weight_map}
    for name, content in (("model.safetensors.index.json", index), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write_shard(values: Values, shard: list[Stored], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({tensor.name: values.make(tensor) for tensor in shard}, path, {"format": "pt"})
