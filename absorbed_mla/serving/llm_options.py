"""Options of ``LLM``, checked before anything that takes long is imported or started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from absorbed_mla.inference.decode_context_parallel.support import require_shares
from absorbed_mla.serving.option_schema import documented, options_of
from absorbed_mla.serving.options import EngineFields, LLMFields

if TYPE_CHECKING:
    from absorbed_mla.serving.engine_options import EngineOptions

# Tokens that the cache holds where no GPU's memory says how many fit.
_CPU_CACHE_TOKENS = 2**16


@documented
@dataclass(frozen=True, kw_only=True)
class LLMOptions(LLMFields):
    """Options of :class:`absorbed_mla.serving.llm.LLM`, under vLLM's names where vLLM has them.

    Raises:
        ValueError: On construction, naming the option, what it got and what it accepts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size and self.tensor_parallel_size % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size must divide tensor_parallel_size "
                f"{self.tensor_parallel_size}, got {self.expert_parallel_size}"
            )
        most = self.prefill_graph_tokens
        if most is not None and most > self.max_num_batched_tokens:
            raise ValueError(
                "prefill_graph_tokens must be at most max_num_batched_tokens "
                f"{self.max_num_batched_tokens}, got {most}"
            )
        if self.decode_context_parallel is True and self.tensor_parallel_size is not None:
            require_shares(self.tensor_parallel_size, 64)
        if self.data_parallel_attention and self.tensor_parallel_size == 1:
            raise ValueError(
                "data_parallel_attention needs tensor_parallel_size of at least 2, got 1"
            )
        divides_experts = self.expert_parallel_size > 1 and not self.data_parallel_attention
        if self.cuda_graphs and divides_experts:
            raise ValueError(
                f"cuda_graphs needs expert_parallel_size=1, got {self.expert_parallel_size}"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LLMOptions:
        """Options by name.

        Raises:
            ValueError: If there is no such option, or a value is out of range.
        """
        names = [*options_of(cls)]
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"LLM has no option {', '.join(unknown)}; it has {', '.join(names)}")
        return cls(**given)

    def for_processes(self, count: int | None) -> LLMOptions:
        """These options with ``tensor_parallel_size`` set.

        Args:
            count: Processes that torchrun started; None: as many are started as are needed.

        Raises:
            ValueError: If the sizes do not divide ``count``, or each other.
        """
        stages = self.pipeline_parallel_size
        if count is None:
            tp = self.tensor_parallel_size or self.expert_parallel_size
            return dataclasses.replace(self, tensor_parallel_size=tp)
        if count % stages:
            raise ValueError(
                f"pipeline_parallel_size must divide torchrun's {count} processes, got {stages}"
            )
        tp = self.tensor_parallel_size or count // stages
        if count // stages % tp:
            raise ValueError(
                f"tensor_parallel_size must divide torchrun's {count} processes, got {tp}"
                + (f" with {stages} pipeline stages" if stages > 1 else "")
            )
        return dataclasses.replace(self, tensor_parallel_size=tp)

    @property
    def num_processes(self) -> int:
        """Processes that hold one model, once ``tensor_parallel_size`` is set."""
        assert self.tensor_parallel_size is not None
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of a forward pass."""
        running = self.max_num_seqs * (1 + self.num_speculative_tokens)
        return self.max_num_batched_tokens + running

    def useful_tokens(self, longest: int) -> int:
        """Tokens that ``max_num_seqs`` requests of ``longest`` tokens keep in the cache."""
        from absorbed_mla.serving.engine_options import cached_tokens

        each = cached_tokens(longest, self.num_speculative_tokens)
        return self.max_num_seqs * -(-each // 64) * 64

    def engine_options(
        self, max_model_len: int, vocab_size: int | None, fitting_tokens: int | None
    ) -> EngineOptions:
        """Options of the engine; with ``prefill_graph_tokens`` 0 for None.

        Args:
            max_model_len: Of the model.
            vocab_size: Token ids that may be generated; None: all rows of the embedding.
            fitting_tokens: Tokens whose cache fits beside the model; None if nothing says so.

        Raises:
            ValueError: If the model has fewer positions than ``max_model_len``.
        """
        from megatron.core.inference.config import PrefixCachingEvictionPolicy

        from absorbed_mla.serving.engine_options import EngineOptions
        from absorbed_mla.serving.scheduler.cuda_graphs import NUM_CUDA_GRAPHS

        longest = self.max_model_len or max_model_len
        if longest > max_model_len:
            raise ValueError(
                f"max_model_len must be at most the model's {max_model_len}, got {longest}"
            )
        useful = self.useful_tokens(longest)
        fitting = _CPU_CACHE_TOKENS if fitting_tokens is None else fitting_tokens
        known = options_of(EngineFields)
        given = {
            one.of_engine or name: getattr(self, name)
            for name, one in options_of(LLMFields).items()
        }
        given = {name: value for name, value in given.items() if name in known}
        sizes: dict[str, Any] = {
            "max_sequence_length": longest,
            "cache_tokens": self.cache_tokens or min(useful, fitting),
            "step_tokens": self.step_tokens,
            "vocab_size": vocab_size,
            "num_cuda_graphs": NUM_CUDA_GRAPHS if self.cuda_graphs else None,
            "prefill_graph_tokens": self.prefill_graph_tokens or 0,
            # What ended requests leave in the cache is kept until the room is needed.
            "inference_config": {"prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU},
        }
        return EngineOptions(**{**given, **sizes})
