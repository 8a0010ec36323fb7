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
DEVICES = ("auto", "cuda", "cpu")
EXPERTS = ("auto", "grouped", "sequential")
# Tokens of a block of the cache.
_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class CommonFields(Options):
    """Options that ``LLM`` and its engine have under one name."""

    cache_tokens: int | None = option(
        None,
        least=_BLOCK,
        unset="what fits",
        help="tokens of all requests that the latent cache holds, in blocks of 64",
        details="With sparse attention it holds their index keys, too. A request that does not fit "
        "waits, and is prefilled again if it lost its blocks. None: ``LLM`` takes what fits beside "
        "the model on a GPU, 65,536 on a CPU, and no more than all requests that run may need; "
        "that is what the engine takes.",
    )
    host_cache_tokens: int = option(
        0,
        least=_BLOCK,
        also=(0,),
        needs={
            "cuda_graphs": (False,),
            "num_cuda_graphs": (None,),
            "parity": (False,),
            "decode_context_parallel": (False,),
        },
        help="tokens that it holds in host memory besides, streamed to the device; slower",
        details="A step streams those that it reads, so that a request may be longer than "
        "``cache_tokens``.",
    )
    prefix_cache_dir: str | Path | None = option(
        None,
        unset="nowhere",
        metavar="FOLDER",
        needs={"prefix_caching": (True,), "decode_context_parallel": (False,)},
        help="folder where blocks of the prefix cache outlive the process",
        details="Blocks that are evicted, or cached when the engine stops, are written there, and "
        "read instead of computed again. Engines of the same weights may share it.",
    )
    prefix_cache_bytes: int = option(
        2**36,
        least=1,
        help="most bytes in the folder of the prefix cache; files used longest ago are deleted",
    )
    prompt_logprobs: bool = option(
        False,
        help="requests may ask for log-probabilities of their prompts",
        details="The output layer then runs for every token of a step.",
    )
    num_speculative_tokens: int = option(
        0,
        least=0,
        help="tokens that the model's MTP layers draft for each request and step",
        details="The tokens generated are the same as with 0, with which ``LLM`` loads no MTP "
        "layer of a checkpoint.",
    )
    seed: int = option(
        0,
        help="of requests without a seed of their own",
        details="Data-parallel ranks draw different numbers.",
    )


@dataclass(frozen=True, kw_only=True)
class EngineFields(CommonFields):
    """Options of the engine."""

    max_sequence_length: int = option(
        least=2, help="tokens of a prompt and what is generated after it"
    )
    max_requests: int = option(
        least=1,
        help="requests that run together; others wait",
        details="Rounded up to a multiple of the tensor-parallel size.",
    )
    paused_cache_tokens: int = option(
        0, least=0, help="part of ``cache_tokens`` that only waiting requests use"
    )
    step_tokens: int = option(
        2048,
        least=1,
        help="tokens of a forward pass",
        details="Rounded up to at least ``max_requests`` and to a multiple of 64 and of the "
        "tensor-parallel size.",
    )
    vocab_size: int | None = option(
        None,
        least=1,
        unset="all rows of the embedding",
        help="token ids that may be generated, where the embedding has more rows",
    )
    chunked_prefill: bool = option(
        True,
        help="prompts longer than a forward pass are read in chunks; otherwise they are refused",
        flag="--no-chunked-prefill",
        flag_help={False: "refuse prompts longer than a forward pass"},
    )
    prefix_caching: bool = option(
        True,
        help="prompts share the cached blocks of 64 tokens that are equal from their start on",
        details="Also with those of requests that have ended.",
        flag="--no-prefix-caching",
        flag_help={False: "share no cache between requests"},
    )
    decode_context_parallel: bool = option(
        False,
        help="ranks share the latents of each request: as many times the tokens in the cache",
        details="Each step exchanges queries and outputs (docs/inference.md). ``cache_tokens`` "
        "counts tokens of requests in both cases. A model with context-parallel ranks generates "
        "only so; these share it, too.",
    )
    num_cuda_graphs: int | None = option(
        None,
        unset="no graphs",
        help="sizes of steps that are captured in CUDA graphs when the engine is built",
        details="See ``scheduler/cuda_graphs.py``.",
    )
    prefill_graph_tokens: int = option(
        0,
        least=0,
        needs={
            "cuda_graphs": (True,),
            "num_cuda_graphs": (GIVEN,),
            "decode_loop": (True, None),
            "num_speculative_tokens": (0,),
            "decode_context_parallel": (False,),
            "data_parallel_attention": (False,),
        },
        help="most tokens of a step that reads prompts in one CUDA graph; 0: a graph for each "
        "layer, of up to 512",
        details="At most those of a forward pass. Larger steps run without a graph, and, where "
        "prompts can be expanded, those that would attend absorbed with more than 1,536 tokens or "
        "a million pairs. See ``scheduler/prefill_graphs.py``.",
    )
    decode_loop: bool | None = option(
        None,
        unset="where they can",
        help="steps that only add a token to each request run without Megatron's scheduler",
        details="Tokens are the same; with graphs, one holds such a step as a whole. A log message "
        "says why not.",
    )
    inference_config: Mapping[str, object] = option(
        {}, help="further fields of Megatron's ``InferenceConfig``"
    )


@dataclass(frozen=True, kw_only=True)
class LLMFields(CommonFields):
    """Options of ``LLM``."""

    tensor_parallel_size: int | None = option(
        None,
        least=1,
        builds_model=True,
        unset="``expert_parallel_size``; under torchrun all processes",
        help="processes that share every layer, each with some of the heads",
    )
    pipeline_parallel_size: int = option(
        1,
        least=1,
        builds_model=True,
        help="stages that share the layers: saves memory, not time",
    )
    expert_parallel_size: int = option(
        1,
        least=1,
        builds_model=True,
        help="groups of these processes that share the experts; divides ``tensor_parallel_size``",
        details="1: every process has a part of every expert. It needs no more processes, and cuts "
        "experts into fewer pieces.",
    )
    dtype: str = option(
        "auto",
        choices=DTYPES,
        builds_model=True,
        help="of weights and computation; auto: the checkpoint's",
    )
    device: str = option(
        "auto",
        choices=DEVICES,
        builds_model=True,
        help="where the model runs; auto: on a GPU where there is one",
    )
    follow_links: bool = option(
        False,
        builds_model=True,
        help="read through links that lead out of the model's folder",
        details="Those of a snapshot in the Hugging Face hub's cache, to the files of the same "
        "model, are always read.",
    )
    trust_remote_code: bool = option(
        False,
        help="run Python code of the tokenizer's folder, if the tokenizer needs it",
        details="In this process: the modules that ``auto_map`` in its tokenizer_config.json (or "
        "config.json) names, and what they import. If not, a tokenizer that needs its code is "
        "refused. Models never run code of a checkpoint.",
    )
    max_model_len: int | None = like(
        EngineFields, "max_sequence_length", default=None, unset="the model's"
    )
    max_num_seqs: int = like(EngineFields, "max_requests", default=64, details="")
    max_num_batched_tokens: int = option(
        2048,
        least=1,
        help="tokens of a forward pass beside those that running requests add",
        details="These are one for each of ``max_num_seqs``, and its drafts, so that prompts fill "
        "a pass whatever runs.",
    )
    gpu_memory_utilization: float = option(
        0.85,
        above=0,
        most=1,
        help="share of the GPU's memory for model and cache, if ``cache_tokens`` does not say",
    )
    enable_prefix_caching: bool = like(EngineFields, "prefix_caching")
    enable_chunked_prefill: bool = like(EngineFields, "chunked_prefill")
    decode_context_parallel: bool | str = like(
        EngineFields,
        "decode_context_parallel",
        choices=(False, True, "auto"),
        details='"auto": where ``max_num_seqs`` requests of ``max_model_len`` tokens do not fit '
        "beside the model otherwise, and nothing else asked for is against it.",
        flag_help={"auto": "share them where not all requests would fit otherwise"},
    )
    data_parallel_attention: bool = option(
        False,
        builds_model=True,
        needs={
            "pipeline_parallel_size": (1,),
            "decode_context_parallel": (False,),
            "host_cache_tokens": (0,),
            "prefix_cache_dir": (None,),
            "num_speculative_tokens": (0,),
            "parity": (False,),
        },
        help="each process has whole attention, for requests and a cache of its own",
        details="All other weights are divided. ``max_num_seqs``, ``max_num_batched_tokens`` and "
        "``cache_tokens`` are then those of each process, which gets the requests that it has the "
        "least load for.",
    )
    parity: bool = option(
        False,
        builds_model=True,
        needs={"form": ("absorbed",), "decode_context_parallel": (False,)},
        help="equal tokens to the bit whatever runs beside a request; slower",
        details="Its log-probabilities are those of training (docs/parity.md).",
    )
    form: str = option(
        "auto",
        choices=FORMS,
        builds_model=True,
        help="of the attention: ``AbsorbedMLAOptions.form``",
    )
    latent_cache_dtype: str = option(
        "model",
        choices=LATENT_CACHE_DTYPES,
        builds_model=True,
        help="of cached latents; fp8: 1.76 times as many tokens in the memory of bf16",
    )
    experts: str = option(
        "auto",
        choices=EXPERTS,
        builds_model=True,
        help="computed together (grouped), or one after the other; auto: together where possible",
        details="Together on a GPU needs bfloat16 and compute capability 9 or 10; with ``parity`` "
        "bfloat16 or float16, and ``tensor_parallel_size`` 1.",
    )
    cuda_graphs: bool = option(
        False,
        needs={"form": ("absorbed",), "device": ("cuda",), "pipeline_parallel_size": (1,)},
        help="capture decode steps as CUDA graphs when the engine is built",
    )
    prefill_graph_tokens: int | None = like(
        EngineFields,
        "prefill_graph_tokens",
        default=None,
        unset="up to 3,072",
        details="None: 3,072, or 1,536 where prompts cannot attend expanded in a graph, or the "
        "tokens of a forward pass if they are fewer; 0 where the model or other options are "
        "against it. See docs/generation.md.",
    )
