"""Options of a generation engine: sizes, scheduling, seed and CUDA graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.inference.config import (
    AsyncScheduleMode,
    InferenceConfig,
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.serving.option_schema import documented, unmet_needs
from absorbed_mla.serving.options import EngineFields
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, block_bytes
from absorbed_mla.serving.scheduler.cuda_graphs import engine_fields

# Sampling parameters that ``LLM`` sees to.
_OF_LLM = ("n", "stop", "truncate_prompt_tokens")
# Option -> fields of inference_config that go with it: Megatron would move the blocks as well, or
# leave none to be stored.
_CONFIG = {
    "host_cache_tokens": {
        "unified_memory_level": 0,
        "kv_cache_management_mode": KVCacheManagementMode.PERSIST,
        "async_sched_mode": AsyncScheduleMode.LEGACY,
    },
    "prefix_cache_dir": {"prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU},
}


@documented
@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineFields):
    """Options of :class:`absorbed_mla.serving.engine.Engine`.

    Raises:
        ValueError: On construction, naming the field, what it got and what it accepts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.paused_cache_tokens // BLOCK_SIZE >= self.cache_blocks:
            raise ValueError(
                "paused_cache_tokens must be at least 0 and a block less than the cache's "
                f"{self.cache_blocks * BLOCK_SIZE}, got {self.paused_cache_tokens}"
            )
        if self.prefill_graph_tokens > self.step_tokens:
            raise ValueError(
                f"prefill_graph_tokens must be from 0 to step_tokens {self.step_tokens}, got "
                f"{self.prefill_graph_tokens}"
            )
        for option, fields in _CONFIG.items():
            for name, accepted in fields.items() if getattr(self, option) not in (None, 0) else ():
                value = self.inference_config.get(name, accepted)
                if value != accepted:
                    raise ValueError(
                        f"{option} needs inference_config {name}={accepted!r}, got {value!r}"
                    )

    def not_with_prefill_graphs(self) -> str:
        """The field, with its value, that does not go with ``prefill_graph_tokens``, or ``""``."""
        refused = unmet_needs(self, "prefill_graph_tokens")
        return next((f"{name}={getattr(self, name)}" for name in refused), "")

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

    @property
    def longest_request(self) -> int:
        """Tokens of a prompt and its answer that fit the context and the cache."""
        beyond = cached_tokens(0, self.num_speculative_tokens)
        return min(self.max_sequence_length, self.request_tokens - beyond)

    def to_host(
        self, config: MLATransformerConfig, num_layers: int, tp: int, cp: int = 1
    ) -> InferenceConfig:
        """Megatron's ``InferenceConfig``, whose sizes in bytes count latents and not index keys.

        Args:
            config: Of the context (``blocks.cache_config``).
            num_layers: Layers of this rank.

        Raises:
            ValueError: If there is host memory, and a step may write to more than the device has.
        """
        max_requests = round_up(self.max_requests, tp)
        paused_blocks = self.paused_cache_tokens // BLOCK_SIZE
        # Megatron's sizes are those of a rank.
        block = block_bytes(config, num_layers) // (tp * cp if self.decode_context_parallel else 1)
        max_tokens = padded_step_tokens(self.step_tokens, max_requests, tp)
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
            fields |= _CONFIG["prefix_cache_dir"]
        return InferenceConfig(**{**fields, **self.inference_config})

    def why_not(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        vocab_size: int,
        max_tokens: int,
        priority: int = 0,
    ) -> str:
        """Why an engine with these options cannot run a request, or ``""``.

        Megatron's own step raises after some of these mistakes, and takes no further one.

        Args:
            prompt: Token ids.
            vocab_size: Rows of the model's embedding.
            max_tokens: Of a forward pass: ``step_tokens``, rounded up.
        """
        length, longest = len(prompt), self.max_sequence_length
        cache = self.request_tokens
        new_tokens = min(
            sampling.max_tokens or max(1, self.longest_request - length), longest - length
        )
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        if not isinstance(priority, int):
            return f"priority must be an integer, got {priority!r:.200}"
        if priority and self.scheduling_policy != "priority":
            return f"priority needs scheduling_policy='priority', got {self.scheduling_policy!r}"
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
        for name in _OF_LLM:
            if getattr(sampling, name) != getattr(SamplingParams, name):
                return f"{name} is for LLM, which knows the text"
        for choice in ("routed_experts", "indexer_topk"):
            first = getattr(sampling, f"{choice}_prompt_start")
            if first and not getattr(self, f"enable_return_{choice}"):
                return f"{choice}_prompt_start needs enable_return_{choice}=True"
            if first >= length:
                return f"{choice}_prompt_start must be below the prompt's {length}, got {first}"
        error = self._why_not_tokens(sampling, self.vocab_size or vocab_size)
        if error:
            return error
        top = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        if top > vocab_size:
            return f"logprobs must be at most the vocabulary's {vocab_size}, got {top}"
        if sampling.prompt_logprobs is not None and not self.prompt_logprobs:
            return "prompt_logprobs needs an engine with prompt_logprobs=True"
        return ""

    def _why_not_tokens(self, sampling: SamplingParams, vocab_size: int) -> str:
        """Why tokens cannot be drawn as a request asks, or ``""``."""
        words = sampling.bad_words
        if any(isinstance(word, str) for word in words):
            return "bad_words with texts is for LLM, which knows their tokens"
        named = {
            "logit_bias": sampling.logit_bias or (),
            "allowed_token_ids": sampling.allowed_token_ids or (),
            "bad_words": [token for word in words for token in word],
        }
        for name, tokens in named.items():
            if any(token >= vocab_size for token in tokens):
                return f"{name} must have tokens below {vocab_size}, got {max(tokens)}"
        if sampling.allowed_token_ids is not None:
            lost = {word[-1] for word in words}
            lost |= set(sampling.stop_token_ids if sampling.min_tokens else ())
            if lost.issuperset(sampling.allowed_token_ids):
                return "allowed_token_ids must have one that bad_words and min_tokens leave"
        return ""


def cached_tokens(length: int, drafts: int) -> int:
    """Tokens for which a request of ``length`` tokens in all needs room in the cache.

    The last step has one token to add at least, and writes ``drafts`` after the one before it.
    """
    return length + max(0, drafts - 1)


def padded_step_tokens(step_tokens: int, max_requests: int, tp: int) -> int:
    """Tokens of the largest forward pass, padding included."""
    return round_up(max(step_tokens, max_requests), math.lcm(BLOCK_SIZE, tp))


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below a value."""
    return -(-value // multiple) * multiple
