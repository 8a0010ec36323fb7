"""A toy model of DeepSeek's shape in this process, alone and with a cache that is too small."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from absorbed_mla import LLM
from absorbed_mla.batch_invariant import enable_batch_invariant_mode
from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.executor.engine_options import engine_options
from absorbed_mla.serving.executor.local import LocalRunner
from absorbed_mla.serving.executor.process_groups import join
from absorbed_mla.serving.llm_engine import LLMEngine
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.load import load_model
from benchmarks.served.adapters import RANK, write_adapters
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face

CONTEXT = 320
# Fields of the config.json, and those that the kernels of GPUs take, or that a CPU is quick with.
_FIELDS = {"num_hidden_layers": 2, "max_position_embeddings": CONTEXT, "rope_scaling": None}
# fmt: off
_WIDE = {
    "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 128, "q_lora_rank": 256,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}
# fmt: on
_NARROW = {"num_attention_heads": 2, "num_key_value_heads": 2}
MODELS = {"dense": {"first_k_dense_replace": 2}, "moe": {"n_routed_experts": 8, "n_group": 4}}
# Engines of processes side by side, in turn: as it is; with prompts in many chunks and hardly any
# cache; with logits of all tokens; with requests that pause, and steps that are not captured.
_ENGINES: tuple[dict[str, object], ...] = (
    {},
    {"max_num_batched_tokens": 64, "cache_tokens": 9 * 64},
    {"prompt_logprobs": True},
    {"cuda_graphs": False, "max_num_seqs": 24, "paused_cache_tokens": 4 * 64},
)
_ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "cache_tokens": 16 * 64}
# Makes the next token depend on more than the last one.
_GAIN = 1.5
# Adapters, whose updates are nearly as large as the weights, and slots for fewer of them.
_ADAPTERS, _ALPHA, _SLOTS = 5, 2000, 2


class Engines:
    """A model with random weights, and the engines around it, in parity mode.

    Args:
        folder: For its checkpoint.
        kind: One of :data:`MODELS`.
        tokenizer: Of its texts.
        index: Number of this process, which chooses options of the engine.

    Attributes:
        adapters: More than may run at the same time.
    """

    def __init__(self, folder: Path, kind: str, tokenizer: Tokenizer, index: int) -> None:
        self._tokenizer = tokenizer
        on_gpu = torch.cuda.is_available()
        given = {**_ENGINE, "cuda_graphs": on_gpu, **_ENGINES[index % len(_ENGINES)]}
        # A GPU runs twice the requests in a step of the same time.
        given |= {name: 2 * size for name, size in given.items() if on_gpu and type(size) is int}
        paused = given.pop("paused_cache_tokens", 0)
        slots = {"enable_lora": True, "max_loras": _SLOTS, "max_lora_rank": RANK}
        options = LLMOptions.of({**given, **slots, "parity": True, "tensor_parallel_size": 1})
        path = folder / f"model-{index}"
        _write_checkpoint(path, MODELS[kind] | {"vocab_size": tokenizer.vocab_size}, on_gpu)
        device = join(options, 0, 1, dist.HashStore())
        enable_batch_invariant_mode(device.type)
        self._model = load_model(open_model(path), options, device)
        folders = write_adapters(path, path, _ADAPTERS, _ALPHA)
        self.adapters = [LoRARequest(one.name, i, one) for i, one in enumerate(folders, 1)]
        sizes = engine_options(self._model, options, CONTEXT, tokenizer.vocab_size)
        self._options = dataclasses.replace(sizes, paused_cache_tokens=paused)

    def alone(self) -> LLM:
        """Without prefix cache and graphs, asleep: each call begins anew."""
        options = dataclasses.replace(
            self._options,
            prefix_caching=False,
            num_cuda_graphs=None,
            prefill_graph_tokens=0,
            cache_tokens=3 * CONTEXT,
            paused_cache_tokens=0,
            prompt_logprobs=False,
        )
        return self._around(LocalRunner(self._model, options), awake=False)

    def mixed(self) -> LLM:
        """With a cache that is too small for the requests that run together; awake."""
        runner = LocalRunner(self._model, self._options)
        runner._wake(capture=True)
        return self._around(runner, awake=True)

    def _around(self, runner: LocalRunner, *, awake: bool) -> LLM:
        llm = LLM.__new__(LLM)
        ends = self._tokenizer.end_tokens
        LLMEngine.__init__(llm, runner, self._tokenizer, ends, awake=awake, enable_lora=True)
        return llm


def _write_checkpoint(folder: Path, fields: dict, on_gpu: bool) -> None:
    """In fp32 for a CPU, wider and in bf16 for a GPU."""
    dtype = torch.bfloat16 if on_gpu else torch.float32
    fields = {**_FIELDS, **(_WIDE if on_gpu else _NARROW), **fields}
    config = tiny_config(**fields, torch_dtype=str(dtype).removeprefix("torch."))
    tensors = random_tensors(config, dtype)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name:
            tensor.mul_(_GAIN / tensor.shape[1] ** 0.5)
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    write_hugging_face(folder, config, tensors)
