"""Options of a generation engine: sizes, scheduling, seed and CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.core.inference.config import (
    AsyncScheduleMode,
    InferenceConfig,
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, block_bytes
from absorbed_mla.serving.scheduler.cuda_graphs import engine_fields

_LRU = PrefixCachingEvictionPolicy.LRU
# With host_cache_tokens, under which Megatron would move the blocks as well.
_TIERED_FIELDS = {
    "unified_memory_level": 0,
    "kv_cache_management_mode": KVCacheManagementMode.PERSIST,
    "async_sched_mode": AsyncScheduleMode.LEGACY,
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of :class:`absorbed_mla.serving.engine.Engine`.

    Attributes:
        max_sequence_length: Maximum number of tokens of a prompt and what is generated after it.
        max_requests: Maximum number of requests that run together; further ones wait. Rounded up
            to a multiple of the tensor-parallel size.
        cache_tokens: Tokens of all requests that the latent cache holds, rounded down to blocks of
            64; with sparse attention it holds their index keys, too. A request that does not fit
            waits, and is prefilled again if it lost its blocks. None: enough for ``max_requests``
            requests of ``max_sequence_length`` tokens.
        host_cache_tokens: Tokens that the cache holds in host memory besides, rounded down to
            blocks. Every step streams those that it reads to the device (docs/latent-cache.md).
        paused_cache_tokens: The part of ``cache_tokens`` that only waiting requests use.
        step_tokens: Maximum number of tokens of a forward pass. Rounded up to at least
            ``max_requests`` and to a multiple of 64 and of the tensor-parallel size.
        vocab_size: Number of token ids that may be generated, where the embedding has more rows;
            None: as many as the embedding has.
        seed: Of requests without a seed of their own; data-parallel ranks draw different numbers.
        prompt_logprobs: Whether requests may ask for log-probabilities of their prompts. The output
            layer then runs for every token of a step, ``step_tokens`` times the vocabulary.
        num_speculative_tokens: Tokens that the model's multi-token-prediction (MTP) layers draft
            for each request and step. The tokens generated are the same as with 0.
        chunked_prefill: Whether a prompt may be cut over several forward passes.
        prefix_caching: Whether prompts share the blocks that are equal from their first token on.
        decode_context_parallel: Whether tensor-parallel ranks share the latents of every request,
            each with 1/TP of them, instead of having all: the cache holds TP times the tokens, and
            each step exchanges queries and outputs (docs/parallel-serving.md). ``cache_tokens``
            counts tokens of requests in both cases. A model with context-parallel ranks generates
            only so; these share it, too.
        prefix_cache_dir: Folder in which the prefix cache outlives the engine and its process;
            blocks that are evicted, or cached when the engine stops, are written there, and read
            instead of computed again (docs/latent-cache.md). None: nowhere.
        prefix_cache_bytes: Most bytes in that folder; files used longest ago are deleted.
        num_cuda_graphs: Numbers of tokens for which steps are captured in CUDA graphs when the
            engine is built; None for no graphs. See ``cuda_graphs.py``.
        prefill_graph_tokens: Most tokens of a step that reads prompts in which one CUDA graph holds
            the whole model; larger steps run without, and, where prompts can be expanded, those
            that would attend absorbed with more than 1,536 tokens or a million pairs. Needs
            ``num_cuda_graphs`` and the decode loop. 0: Megatron's graphs, one for each layer, for
            up to 512 tokens. See ``prefill_graphs.py``.
        decode_loop: Whether steps that only add a token to each request run without Megatron's
            scheduler. Tokens are the same; with graphs, one holds such a step as a whole. None:
            where they can; a log message says why not.
        inference_config: Further fields of Megatron's ``InferenceConfig``.

    Raises:
        ValueError: On construction, naming the field, what it got and what it accepts.
    """

    max_sequence_length: int
    max_requests: int
    cache_tokens: int | None = None
    host_cache_tokens: int = 0
    paused_cache_tokens: int = 0
    step_tokens: int = 2048
    vocab_size: int | None = None
    seed: int = 0
    prompt_logprobs: bool = False
    num_speculative_tokens: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    decode_context_parallel: bool = False
    prefix_cache_dir: str | Path | None = None
    prefix_cache_bytes: int = 2**36
    num_cuda_graphs: int | None = None
    prefill_graph_tokens: int = 0
    decode_loop: bool | None = None
    inference_config: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_sequence_length < 2 or self.max_requests < 1:
            raise ValueError(
                "max_sequence_length must be at least 2 and max_requests at least 1, got "
                f"{self.max_sequence_length} and {self.max_requests}"
            )
        if self.num_speculative_tokens < 0:
            raise ValueError(
                f"num_speculative_tokens must be at least 0, got {self.num_speculative_tokens}"
            )
        if not isinstance(self.decode_context_parallel, bool):
            raise ValueError(
                "decode_context_parallel must be True or False, got "
                f"{self.decode_context_parallel!r}"
            )
        if self.cache_tokens is not None and self.cache_tokens < BLOCK_SIZE:
            raise ValueError(f"cache_tokens must be at least {BLOCK_SIZE}, got {self.cache_tokens}")
        if not 0 <= self.paused_cache_tokens // BLOCK_SIZE < self.cache_blocks:
            raise ValueError(
                "paused_cache_tokens must be at least 0 and a block less than the cache's "
                f"{self.cache_blocks * BLOCK_SIZE}, got {self.paused_cache_tokens}"
            )
        if self.host_cache_tokens:
            self._require_two_tiers()
        self._require_prefill_graphs()
        if self.prefix_cache_bytes < 1:
            raise ValueError(
                f"prefix_cache_bytes must be at least 1, got {self.prefix_cache_bytes}"
            )
        if self.prefix_cache_dir is not None:
            self._require_lasting_prefixes()

    def _require_two_tiers(self) -> None:
        """Refuse what a cache that is partly in host memory cannot do."""
        if self.host_cache_tokens < BLOCK_SIZE:
            raise ValueError(
                f"host_cache_tokens must be 0 or at least {BLOCK_SIZE}, got "
                f"{self.host_cache_tokens}"
            )
        if self.num_cuda_graphs is not None:
            raise ValueError(
                "host_cache_tokens needs num_cuda_graphs=None (cuda_graphs=False): what a step "
                f"copies depends on its requests; got {self.num_cuda_graphs}"
            )
        if self.decode_context_parallel:
            raise ValueError("host_cache_tokens needs decode_context_parallel=False, got True")
        for name, accepted in _TIERED_FIELDS.items():
            value = self.inference_config.get(name, accepted)
            if value != accepted:
                raise ValueError(
                    f"host_cache_tokens needs inference_config {name}={accepted!r}, got {value!r}"
                )

    def _require_prefill_graphs(self) -> None:
        """Refuse graphs of steps that read prompts where there are none of decode steps."""
        most = self.prefill_graph_tokens
        if not 0 <= most <= self.step_tokens:
            raise ValueError(
                f"prefill_graph_tokens must be from 0 to step_tokens {self.step_tokens}, got {most}"
            )
        refused = self.not_with_prefill_graphs()
        if most and refused:
            raise ValueError(
                "prefill_graph_tokens needs num_cuda_graphs, decode_loop=True or None, "
                "num_speculative_tokens=0 and decode_context_parallel=False, got "
                f"{refused}"
            )

    def not_with_prefill_graphs(self) -> str:
        """The field, with its value, that does not go with ``prefill_graph_tokens``, or ``""``."""
        works = {
            "num_cuda_graphs": self.num_cuda_graphs is not None,
            "decode_loop": self.decode_loop is not False,
            "num_speculative_tokens": not self.num_speculative_tokens,
            "decode_context_parallel": not self.decode_context_parallel,
        }
        refused = (f"{name}={getattr(self, name)}" for name, each in works.items() if not each)
        return next(refused, "")

    def _require_lasting_prefixes(self) -> None:
        """Refuse what leaves no blocks in the prefix cache to be written or read."""
        if not self.prefix_caching:
            raise ValueError("prefix_cache_dir needs prefix_caching=True, got False")
        if self.decode_context_parallel:
            raise ValueError("prefix_cache_dir needs decode_context_parallel=False, got True")
        policy = self.inference_config.get("prefix_caching_eviction_policy", _LRU)
        if policy != _LRU:
            raise ValueError(
                f"prefix_cache_dir needs prefix_caching_eviction_policy {_LRU}, got {policy}"
            )

    @property
    def cache_blocks(self) -> int:
        """Number of blocks of the latent cache on the device."""
        if self.cache_tokens is None:
            longest = cached_tokens(self.max_sequence_length, self.num_speculative_tokens)
            return self.max_requests * -(-longest // BLOCK_SIZE)
        return self.cache_tokens // BLOCK_SIZE

    @property
    def host_blocks(self) -> int:
        """Number of blocks of the latent cache in host memory."""
        return self.host_cache_tokens // BLOCK_SIZE

    @property
    def request_tokens(self) -> int:
        """Most tokens that one request has in the cache."""
        paused = self.paused_cache_tokens // BLOCK_SIZE
        return (self.cache_blocks + self.host_blocks - paused) * BLOCK_SIZE

    def room(self, length: int) -> int:
        """Tokens that fit the context and the cache after a prompt; 0 or less: none."""
        beyond = cached_tokens(0, self.num_speculative_tokens)
        return min(self.max_sequence_length, self.request_tokens - beyond) - length

    def to_host(
        self, config: MLATransformerConfig, num_layers: int, tp: int, cp: int = 1
    ) -> InferenceConfig:
        """Megatron's ``InferenceConfig``, whose sizes in bytes count latents and not index keys.

        Args:
            config: Of the context (``blocks.cache_config``).
            num_layers: Layers of this rank.
            tp: Tensor-parallel size.
            cp: Context-parallel size.

        Raises:
            ValueError: If there is host memory, and a step may write to more than the device has.
        """
        max_requests = _round_up(self.max_requests, tp)
        paused_blocks = self.paused_cache_tokens // BLOCK_SIZE
        # Megatron's sizes are those of a rank.
        block = block_bytes(config, num_layers) // (tp * cp if self.decode_context_parallel else 1)
        max_tokens = _round_up(max(self.step_tokens, max_requests), math.lcm(BLOCK_SIZE, tp))
        # A request's new tokens begin and end in the middle of a block.
        written = max_tokens // BLOCK_SIZE + 2 * max_requests
        if self.host_blocks and self.cache_blocks < written:
            raise ValueError(
                f"host_cache_tokens needs cache_tokens of at least {written * BLOCK_SIZE} for "
                f"{max_requests} requests and {max_tokens} tokens of a step, got "
                f"{self.cache_tokens}"
            )
        fields: dict[str, object] = {
            "block_size_tokens": BLOCK_SIZE,
            # Megatron keeps one block of its own, for padding.
            "buffer_size_gb": (self.cache_blocks + self.host_blocks + 1) * block / 2**30,
            "paused_buffer_size_gb": paused_blocks * block / 2**30,
            "max_sequence_length": self.max_sequence_length,
            "max_requests": max_requests,
            "max_tokens": max_tokens,
            "enable_chunked_prefill": self.chunked_prefill,
            "enable_prefix_caching": self.prefix_caching,
            "materialize_only_last_token_logits": not self.prompt_logprobs,
            "num_speculative_tokens": self.num_speculative_tokens,
            **engine_fields(
                self.num_cuda_graphs,
                config.moe_pad_experts_for_cuda_graph_inference,
                whole_prefills=self.prefill_graph_tokens > 0,
            ),
        }
        if self.prefix_cache_dir is not None:
            fields["prefix_caching_eviction_policy"] = _LRU
        return InferenceConfig(**{**fields, **self.inference_config})

    def why_not(
        self, prompt: Sequence[int], sampling: SamplingParams, vocab_size: int, max_tokens: int
    ) -> str:
        """Why an engine with these options cannot run a request, or ``""``.

        Megatron's own step raises after some of these mistakes, and takes no further one.

        Args:
            prompt: Token ids.
            sampling: Of the request.
            vocab_size: Rows of the model's embedding.
            max_tokens: Of a forward pass: ``step_tokens``, rounded up.
        """
        length, longest = len(prompt), self.max_sequence_length
        cache = self.request_tokens
        new_tokens = min(sampling.max_tokens or max(1, self.room(length)), longest - length)
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        if not length:
            return "the prompt is empty"
        if outside:
            return f"token {outside[0]} is not in the vocabulary of {vocab_size}"
        if length >= longest:
            return f"the prompt has {length} tokens and must be shorter than {longest}"
        if not self.chunked_prefill and length > max_tokens:
            return f"the prompt has {length} tokens, a step without chunks {max_tokens}"
        needed = cached_tokens(length + new_tokens, self.num_speculative_tokens)
        if needed > cache:
            beyond = needed - length - new_tokens
            return (
                f"the prompt's {length} tokens and {new_tokens} new ones"
                + (f", and {beyond} more for drafts," if beyond else "")
                + f" do not fit into a cache of {cache}"
            )
        if sampling.n != 1 or sampling.stop:
            return "n and stop are for LLM, which knows the text; the engine has stop_token_ids"
        top = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        if top > vocab_size:
            return f"logprobs must be at most the vocabulary's {vocab_size}, got {top}"
        if sampling.prompt_logprobs is not None and not self.prompt_logprobs:
            return "prompt_logprobs needs an engine with prompt_logprobs=True"
        return ""


def cached_tokens(length: int, drafts: int) -> int:
    """Tokens for which a request of ``length`` tokens in all needs room in the cache.

    The last step has one token to add at least, and writes ``drafts`` after the one before it.
    """
    return length + max(0, drafts - 1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
