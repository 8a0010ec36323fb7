"""Small models, their tensors in memory, and checkpoints of them in every format but per-rank."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import PartResult, TargetOptions, Writer
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint, HuggingFaceWriter
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from checkpoint_conversion.formats.torch_dist_writer import TorchDistWriter
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.manifest import RunningChecksum
from checkpoint_conversion.mapping import duplicates, hugging_face_shapes
from checkpoint_conversion.model import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Small enough that a tiny model has many files.
PART_BYTES = 1 << 14
# What transformers keeps, and saves, in float32.
IN_FLOAT32 = ("e_score_correction_bias", "indexer.weights_proj.weight")


def hugging_face_config(**changes) -> dict:
    """The config.json of a tiny DeepSeek-V3."""
    # fmt: off
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 64,
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_shared_experts": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "num_nextn_predict_layers": 0,
        "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "max_position_embeddings": 128,
        "rope_scaling": {
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }
    # fmt: on
    return {**config, **changes}


# fmt: off
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
    "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
}
V32 = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 6,
}
GLM5 = {
    **V32,
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "indexer_rope_interleave": True, "rms_norm_eps": 1e-5, "rope_scaling": None, "n_group": 1,
    "qk_nope_head_dim": 20, "v_head_dim": 28,
}
SHARED = {
    **GLM5,
    "num_hidden_layers": 6,
    "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
    "index_topk_freq": 3, "index_skip_topk_offset": 2,
}
# fmt: on
YARN = {**hugging_face_config()["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
MISTRAL4 = {
    "model_type": "mistral4",
    "architectures": ["Mistral4ForCausalLM"],
    **dict.fromkeys(("scoring_func", "topk_method", "rope_scaling")),
    "n_group": 1,
    "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
}
MINICPM3 = {
    "model_type": "minicpm3",
    "architectures": ["MiniCPM3ForCausalLM"],
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1, 1.5, 2, 3],
        "long_factor": [9.0] * 4,
        "original_max_position_embeddings": 128,
    },
}


def tiny_config(**changes) -> ModelConfig:
    """A tiny model; ``changes`` are fields of its config.json."""
    return ModelConfig.from_hugging_face(hugging_face_config(**changes))


AXK1 = {
    "model_type": "axk1",
    "architectures": ["AXK1ForCausalLM"],
    "num_nextn_predict_layers": 1,
}
CONFIGS: dict[str, dict] = {
    "v3": {},
    "v2_lite": V2_LITE,
    "dense": {"first_k_dense_replace": 3},
    "all_moe": {"first_k_dense_replace": 0},
    "mtp": {"num_nextn_predict_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "axk1": AXK1,
    "v32": {**V32, "num_nextn_predict_layers": 1},
    "glm5": GLM5,
    "shared": {**SHARED, "num_nextn_predict_layers": 1},
    "dense shared": {**SHARED, "first_k_dense_replace": 6},
}

# Without a query down-projection to fuse, or with an indexer, for which Megatron has no such layer.
NO_FUSED_DOWN = ("v2_lite", "v32", "glm5", "shared", "dense shared")


def random_tensors(
    config: ModelConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Tensor]:
    """Every tensor of a model under its Hugging Face name."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in hugging_face_shapes(config).items():
        wide = torch.float32 if name.endswith(IN_FLOAT32) else dtype
        result[name] = torch.randn(shape, generator=generator).to(wide)
    for name, original in duplicates(config).items():
        result[name] = result[original].clone()
    return result


def in_memory(tensors: dict[str, Tensor]) -> dict[str, LazyTensor]:
    """Lazy tensors that load what is there already."""
    return {name: lazy(name, tensor) for name, tensor in tensors.items()}


def lazy(name: str, tensor: Tensor) -> LazyTensor:
    return LazyTensor(
        tuple(tensor.shape), tensor.dtype, lambda session: tensor, frozenset({name}), tensor.nbytes
    )


def load_all(tensors: dict[str, LazyTensor]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        with ReadSession() as session:
            result[name] = tensor.load(session).clone()
    return result


def write_with(
    writer: Writer,
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    part_bytes: int = 1 << 20,
    auxiliary: Mapping[str, Path] | None = None,
) -> list[PartResult]:
    """Write a checkpoint as the conversion does, but the last part first; results in order."""
    parts, results = writer.plan(tensors, part_bytes), {}
    for part in reversed(parts):
        with ReadSession() as session:
            results[part.name] = writer.write_part(folder, part, session, lambda nbytes: None)
    ordered = [results[part.name] for part in parts]
    writer.finish(folder, ordered, auxiliary or {})
    return ordered


def tensor_checksum(tensor: Tensor) -> str:
    """What the manifest holds of a tensor."""
    running = RunningChecksum()
    running.update(tensor)
    return running.hexdigest()


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Same names, shapes, dtypes and bits."""
    assert set(a) == set(b)
    for name in a:
        assert a[name].shape == b[name].shape, name
        assert a[name].dtype == b[name].dtype, name
        assert a[name].isfinite().all(), name
        assert torch.equal(a[name], b[name]), name


def write_hugging_face(
    folder: Path, config: ModelConfig, tensors: dict[str, Tensor], shards: int = 2
) -> Path:
    """A sharded checkpoint, written with nothing of the package."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.hugging_face))
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        own = names[i::shards]
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(own, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes) -> Path:
    """A Hugging Face folder of the tiny model; ``changes`` are fields of its config.json."""
    config = tiny_config(**changes)
    return write_hugging_face(folder, config, random_tensors(config, dtype))


def read(folder: Path, **how) -> dict[str, Tensor]:
    """Hugging Face's tensors of a checkpoint of any format."""
    return load_all(open_checkpoint(folder, **how).hugging_face_tensors())


@contextmanager
def refused(*parts: str, problems: int | None = None) -> Iterator[pytest.ExceptionInfo]:
    """The block raises a CheckpointError that holds every part, and lists so many problems."""
    with pytest.raises(CheckpointError) as caught:
        yield caught
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"
    assert problems is None or len(caught.value.problems) == problems, caught.value


def rewritten(
    source: HuggingFaceCheckpoint,
    folder: Path,
    options: TargetOptions | None = None,
    part_bytes: int = 1 << 20,
) -> tuple[HuggingFaceWriter, list[PartResult]]:
    """Write what a checkpoint holds to a new folder."""
    options = options or TargetOptions()
    folder.mkdir()
    writer = HuggingFaceWriter(source.config, options)
    tensors = source.hugging_face_tensors(options.dtype)
    return writer, write_with(writer, folder, tensors, part_bytes, source.auxiliary)


def safetensors_bytes(header: dict | bytes, data: bytes, header_size: int | None = None) -> bytes:
    """A safetensors file, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_size is None else header_size) + text + data


def described(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    """One tensor of a safetensors header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def change_json(path: Path, **changes) -> None:
    """Replace fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_torch_dist(
    folder: Path, config: ModelConfig, tensors: dict[str, Tensor], to: str = "megatron", **options
) -> list[PartResult]:
    return write_lazy(folder, config, in_memory(tensors), to, **options)


def write_lazy(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, LazyTensor],
    to: str = "megatron",
    part_bytes: int = PART_BYTES,
    **options,
) -> list[PartResult]:
    """Write a checkpoint of tensors that need not be in memory."""
    writer = TorchDistWriter(config, TargetOptions(**options), to)
    return write_with(writer, folder, tensors, part_bytes)


def read_torch_dist(folder: Path) -> dict[str, Tensor]:
    """Hugging Face's tensors of a checkpoint."""
    return load_all(TorchDistCheckpoint(folder).hugging_face_tensors())


class PeakMemory:
    """The growth of this process's resident memory, at its peak, since this was made.

    ``getrusage`` cannot tell: a new program starts with the peak of the process that started it.
    """

    def __init__(self) -> None:
        # Makes the peak what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        self._start = self._peak()

    @property
    def growth(self) -> int:
        """Bytes."""
        return self._peak() - self._start

    @staticmethod
    def _peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
