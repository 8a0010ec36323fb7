"""The options of ``LLM`` and of its engine, each declared once.

``LLMOptions`` and ``EngineOptions`` are these with the checks that need several of them. An option
of :class:`CommonFields` is one of both, and ``LLM`` gives it to its engine; flags of
``absorbed-mla-serve`` and of scripts, and the tables of the documentation, are derived. Nothing
here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from absorbed_mla.options import FORMS, LATENT_CACHE_DTYPES
from absorbed_mla.serving.option_schema import GIVEN, Options, like, option

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Choices of layers are in the device's blocks, beside the latents.
_KEEPS_CHOICES = {"host_cache_tokens": (0,), "prefix_cache_dir": (None,)}
_ON_ONE_RANK = {"decode_context_parallel": (False,)}


@dataclass(frozen=True, kw_only=True)
class CommonFields(Options):
    """Options that ``LLM`` and its engine have under one name."""

    cache_tokens: int | None = option(None, least=64, unset="what fits")
    """Tokens of all requests that the latent cache holds, in blocks of 64. With sparse attention it
    holds their index keys, too. A request that does not fit waits, and is prefilled again if it
    lost its blocks. None: in ``LLM`` what fits beside the model on a GPU, 65,536 on a CPU, and in
    both cases at most what all requests that run may need; in the engine as many as these need."""
    host_cache_tokens: int = option(
        0,
        least=64,
        also=(0,),
        needs={"cuda_graphs": (False,), "num_cuda_graphs": (None,), "parity": (False,)}
        | _ON_ONE_RANK,
    )
    """Tokens that it holds in host memory besides, streamed to the device; slower. A step streams
    those that it reads, so that a request may be longer than ``cache_tokens``."""
    prefix_cache_dir: str | Path | None = option(
        None, unset="nowhere", needs={"prefix_caching": (True,), **_ON_ONE_RANK}
    )
    """Folder where blocks of the prefix cache outlive the process. Those that are evicted, or
    cached when the engine stops, are written there, and read instead of computed again. Engines of
    the same weights may share it."""
    prefix_cache_bytes: int = option(2**36, least=1)
    """Most bytes in that folder; files used longest ago are deleted."""
    cascade_attention: str = option(
        "off",
        choices=("auto", "on", "off"),
        needs={
            "prefix_caching": (True,),
            "host_cache_tokens": (0,),
            "parity": (False,),
            "form": ("absorbed",),
            **_ON_ONE_RANK,
        },
    )
    """Requests of a decode step that begin with the same cached blocks attend to these together.
    auto: where that saves time, and nothing is against it, such as sparse attention; on: wherever
    two share a block."""
    prompt_logprobs: bool = option(False)
    """Requests may ask for log-probabilities of their prompts. The output layer then runs for every
    token of a step."""
    num_speculative_tokens: int = option(0, least=0)
    """Tokens that the model's MTP layers draft for each request and step. The tokens generated are
    the same as with 0, with which ``LLM`` loads no MTP layer of a checkpoint."""
    scheduling_policy: str = option("fcfs", choices=("fcfs", "priority"))
    """Which request begins first: the one that came first, or the one with the smallest
    ``priority``. Where blocks are short, the running one that would begin last then loses its
    own."""
    enable_return_routed_experts: bool = option(False, needs=_KEEPS_CHOICES)
    """Outputs say which experts each token was routed to. A token takes as many bytes beside its
    latents as it has experts in all layers."""
    enable_return_indexer_topk: bool = option(False, needs=_KEEPS_CHOICES)
    """Outputs say which keys sparse attention chose for each token. A token takes 4 bytes for each
    of them beside its latents, in every layer with an indexer."""
    seed: int = option(0)
    """Of requests without a seed of their own. Data-parallel ranks draw different numbers."""


@dataclass(frozen=True, kw_only=True)
class EngineFields(CommonFields):
    """Options of the engine."""

    max_sequence_length: int = option(least=2)
    """Tokens of a prompt and what is generated after it."""
    max_requests: int = option(least=1)
    """Requests that run together; others wait. Rounded up to a multiple of the tensor-parallel
    size."""
    paused_cache_tokens: int = option(0, least=0)
    """Part of ``cache_tokens`` that only waiting requests use."""
    step_tokens: int = option(2048, least=1)
    """Tokens of a forward pass. Rounded up to at least ``max_requests`` and to a multiple of 64 and
    of the tensor-parallel size."""
    vocab_size: int | None = option(None, least=1, unset="all rows of the embedding")
    """Token ids that may be generated, where the embedding has more rows."""
    chunked_prefill: bool = option(
        True,
        flag="--no-chunked-prefill",
        flag_help={False: "refuse prompts longer than a forward pass"},
    )
    """Prompts longer than a forward pass are read in chunks; otherwise they are refused."""
    prefix_caching: bool = option(
        True, flag="--no-prefix-caching", flag_help={False: "share no cache between requests"}
    )
    """Prompts share the cached blocks of 64 tokens that are equal from their start on. Also with
    those of requests that have ended."""
    decode_context_parallel: bool = option(False)
    """Ranks share the latents of each request: as many times the tokens in the cache. Each step
    exchanges queries and outputs. ``cache_tokens`` counts tokens of requests in both cases. A model
    with context-parallel ranks generates only so; these share it, too."""
    num_cuda_graphs: int | None = option(None, unset="no graphs")
    """Sizes of steps that are captured in CUDA graphs when the engine is built. See
    ``scheduler/cuda_graphs.py``."""
    prefill_graph_tokens: int = option(
        0,
        least=0,
        needs={
            "cuda_graphs": (True,),
            "num_cuda_graphs": (GIVEN,),
            "decode_loop": (True, None),
            "num_speculative_tokens": (0,),
            "data_parallel_attention": (False,),
            **_ON_ONE_RANK,
        },
    )
    """Most tokens of a step that reads prompts in one CUDA graph; 0: a graph for each layer, of up
    to 512. At most those of a forward pass. Larger steps run without a graph, and, where prompts
    can be expanded, those that would attend absorbed with more than 1,536 tokens or a million
    pairs. See ``scheduler/prefill_graphs.py``."""
    decode_loop: bool | None = option(None, unset="where they can")
    """Steps that only add a token to each request run without Megatron's scheduler. Tokens are the
    same; with graphs, one holds such a step as a whole. A log message says why not."""
    inference_config: Mapping[str, object] = option({})
    """Further fields of Megatron's ``InferenceConfig``."""


@dataclass(frozen=True, kw_only=True)
class ModelFields(Options):
    """Options of ``LLM`` that decide how a model is read and built, which a live model is."""

    tensor_parallel_size: int | None = option(
        None, least=1, unset="``expert_parallel_size``; under torchrun all processes"
    )
    """Processes that share every layer, each with some of the heads."""
    pipeline_parallel_size: int = option(1, least=1)
    """Stages that share the layers: saves memory, not time."""
    expert_parallel_size: int = option(1, least=1)
    """Groups of the tensor-parallel processes that share the experts. It divides their number. 1:
    every process has a part of every expert. It needs no more processes, and cuts experts into
    fewer pieces."""
    data_parallel_attention: bool = option(
        False,
        needs={
            "pipeline_parallel_size": (1,),
            "host_cache_tokens": (0,),
            "prefix_cache_dir": (None,),
            "num_speculative_tokens": (0,),
            "parity": (False,),
            **_ON_ONE_RANK,
        },
    )
    """Each process has whole attention, for requests and a cache of its own. All other weights are
    divided. ``max_num_seqs``, ``max_num_batched_tokens`` and ``cache_tokens`` are then those of
    each process, which gets the requests that it has the least load for."""
    dtype: str = option("auto", choices=DTYPES)
    """Of weights and computation; auto: the checkpoint's."""
    device: str = option("auto", choices=("auto", "cuda", "cpu"))
    """Where the model runs; auto: on a GPU where there is one."""
    form: str = option("auto", choices=FORMS)
    """Of the attention: ``AbsorbedMLAOptions.form``."""
    latent_cache_dtype: str = option("model", choices=LATENT_CACHE_DTYPES)
    """Of cached latents; fp8: 1.76 times as many tokens in the memory of bf16."""
    experts: str = option("auto", choices=("auto", "grouped", "sequential"))
    """Computed together (grouped), or one after the other; auto: together where possible. Together
    on a GPU needs bfloat16 and compute capability 9 or 10; with ``parity`` bfloat16 or float16,
    ``tensor_parallel_size`` 1, and at most 8 ``tensor_parallel_parts``."""
    parity: bool = option(False, needs={"form": ("absorbed",), **_ON_ONE_RANK})
    """Equal tokens to the bit whatever runs beside a request; slower. Its log-probabilities are
    those of training (docs/parity.md)."""
    enable_lora: bool = option(
        False,
        needs={
            "form": ("auto", "absorbed"),
            "tensor_parallel_parts": (None,),
            "num_speculative_tokens": (0,),
            "data_parallel_attention": (False,),
            **_ON_ONE_RANK,
        },
    )
    """Requests may have a ``lora_request``, each its own. The attention is then absorbed in every
    step."""
    max_loras: int = option(4, least=1)
    """Adapters that requests may have at the same time. A request with another one waits until none
    has one of them. All are multiplied in every step that has one, with ``cuda_graphs`` in all."""
    max_lora_rank: int = option(16, least=1)
    """Of an adapter, rounded up to a multiple of 16; ``kv_b_proj`` may have twice that of others
    (docs/lora.md). With ``parity``, ``max_loras`` times it is at most 2048."""
    tensor_parallel_parts: int | None = option(
        None,
        choices=(2, 4, 8, 16, 32, 64),
        unset="as processes divide them",
        needs={"parity": (True,)},
    )
    """Parts of every sum over tensor-parallel processes; tokens and log-probabilities are then
    equal to the bit at every ``tensor_parallel_size`` that divides it, at 1 too."""
    follow_links: bool = option(False)
    """Read through links that lead out of the model's folder. Those of a snapshot in the Hugging
    Face hub's cache, to the files of the same model, are always read."""


@dataclass(frozen=True, kw_only=True)
class LLMFields(ModelFields, CommonFields):
    """Options of ``LLM``."""

    max_model_len: int | None = like(
        EngineFields, "max_sequence_length", default=None, unset="the model's"
    )
    max_num_seqs: int = like(EngineFields, "max_requests", default=64)
    """Requests that run together; others wait."""
    max_num_batched_tokens: int = option(2048, least=1)
    """Tokens of a forward pass beside those that running requests add. These are one for each of
    ``max_num_seqs``, and its drafts, so that prompts fill a pass whatever runs."""
    gpu_memory_utilization: float = option(0.85, above=0, most=1)
    """Share of the GPU's memory for model and cache, if ``cache_tokens`` does not say."""
    enable_prefix_caching: bool = like(EngineFields, "prefix_caching")
    enable_chunked_prefill: bool = like(EngineFields, "chunked_prefill")
    decode_context_parallel: bool | str = like(
        EngineFields,
        "decode_context_parallel",
        choices=(False, True, "auto"),
        flag_help={"auto": "share them where not all requests would fit otherwise"},
    )
    """Ranks share the latents of each request: as many times the tokens in the cache. ``"auto"``:
    where ``max_num_seqs`` requests of ``max_model_len`` tokens do not fit beside the model
    otherwise, and nothing else asked for is against it."""
    cuda_graphs: bool = option(
        False, needs={"form": ("absorbed",), "device": ("cuda",), "pipeline_parallel_size": (1,)}
    )
    """Capture decode steps as CUDA graphs when the engine is built."""
    prefill_graph_tokens: int | None = like(
        EngineFields, "prefill_graph_tokens", default=None, unset="up to 3,072"
    )
    """Most tokens of a step that reads prompts in one CUDA graph; 0: a graph for each layer, of up
    to 512. At most ``max_num_batched_tokens``. None: 3,072, or 1,536 where prompts cannot attend
    expanded in a graph, or the tokens of a forward pass if they are fewer; 0 where the model or
    other options are against it."""
    trust_remote_code: bool = option(False)
    """Run Python code of the tokenizer's folder, if the tokenizer needs it. In this process: the
    modules that ``auto_map`` in its tokenizer_config.json (or config.json) names, and what they
    import. If not, a tokenizer that needs its code is refused. Models never run code of a
    checkpoint."""
