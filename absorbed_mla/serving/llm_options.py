"""Options of ``LLM``, checked before anything that takes long is imported or started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absorbed_mla.inference.decode_context_parallel.support import require_shares
from absorbed_mla.options import LATENT_CACHE_DTYPES

if TYPE_CHECKING:
    from absorbed_mla.serving.engine_options import EngineOptions

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cuda", "cpu")
EXPERTS = ("auto", "grouped", "sequential")
# With data_parallel_attention.
_DIVIDED = {
    "pipeline_parallel_size": 1,
    "decode_context_parallel": False,
    "host_cache_tokens": 0,
    "prefix_cache_dir": None,
    "num_speculative_tokens": 0,
    "parity": False,
}
# Tokens that the cache holds where no GPU's memory says how many fit.
_CPU_CACHE_TOKENS = 2**16


@dataclass(frozen=True, kw_only=True)
class LLMOptions:
    """Options of :class:`absorbed_mla.serving.llm.LLM`, under vLLM's names where vLLM has them.

    Attributes:
        tensor_parallel_size: Number of processes that share every layer, each with some of the
            heads. None: ``expert_parallel_size``, or under torchrun all that
            ``pipeline_parallel_size`` leaves.
        pipeline_parallel_size: Number of stages, each with its share of the layers, for models that
            do not fit otherwise: stages wait for each other, so this saves memory and no time.
        expert_parallel_size: Into how many groups the tensor-parallel processes divide, each with
            its share of the experts; divides ``tensor_parallel_size``. 1: every process has a part
            of every expert. It needs no more processes, and cuts experts into fewer pieces.
        dtype: Of weights and computation: ``"float32"``, ``"bfloat16"``, ``"float16"``;
            ``"auto"`` is the checkpoint's.
        device: ``"cuda"``, ``"cpu"``, or ``"auto"`` for a GPU where there is one.
        follow_links: Whether links in the checkpoint's folder may lead anywhere. Those of a
            snapshot in the Hugging Face hub's cache, to the files of the same model, always may.
        trust_remote_code: Whether a tokenizer may run Python code of its folder, in this process:
            the modules that ``auto_map`` in its tokenizer_config.json (or config.json) names, and
            what they import. If not, a tokenizer that needs its code is refused. Models never run
            code of a checkpoint.
        max_model_len: Maximum number of tokens of a prompt and what is generated after it; None:
            the model's.
        max_num_seqs: Maximum number of requests that run together; others wait.
        max_num_batched_tokens: Maximum number of tokens of a forward pass, beside those that
            ``max_num_seqs`` running requests add (one each, and drafts), so that prompts fill it
            whatever runs.
        cache_tokens: Tokens of all requests that the latent cache holds. None: on a GPU what fits
            beside the model, on a CPU 65,536, in both cases at most ``max_num_seqs`` times
            ``max_model_len``.
        host_cache_tokens: Tokens that the cache holds in host memory besides. A step streams those
            that it reads to the GPU, so that a request may be longer than ``cache_tokens``; slower.
        gpu_memory_utilization: Share of the GPU's memory that model and cache take, if
            ``cache_tokens`` is None.
        enable_prefix_caching: Whether prompts share the cached blocks of 64 tokens that are equal
            from their first token on, also with those of requests that have ended.
        prefix_cache_dir: Folder in which these blocks outlive the process; engines of the same
            weights may share it. None: nowhere.
        prefix_cache_bytes: Most bytes in that folder; files used longest ago are deleted.
        enable_chunked_prefill: Whether prompts longer than a forward pass are read in chunks; if
            not, they are refused.
        decode_context_parallel: Whether the tensor-parallel processes share the cache, each with
            its part of every request's tokens, instead of having all of it: it holds
            ``tensor_parallel_size`` times the tokens in the same memory. Not with ``parity``.
            ``"auto"``: where ``max_num_seqs`` requests of ``max_model_len`` tokens do not fit
            beside the model otherwise, and nothing else asked for is against it.
        data_parallel_attention: Whether each of the tensor-parallel processes has whole attention,
            for requests and a cache of its own, and divides all other weights with the others.
            ``max_num_seqs``, ``max_num_batched_tokens`` and ``cache_tokens`` are then those of each
            process, which gets the requests that it has the least load for.
        prompt_logprobs: Whether requests may ask for log-probabilities of their prompts.
        num_speculative_tokens: Tokens that the checkpoint's MTP layer drafts per request and step;
            0 loads no MTP layer. Tokens generated are the same.
        seed: Of requests without a seed of their own.
        parity: Parity mode: a request's tokens are equal to the bit whatever runs beside it, and
            its log-probs to those of training; slower (``docs/parity.md``).
        form: ``"absorbed"``, ``"expanded"`` or ``"auto"``; see ``AbsorbedMLAOptions``.
        latent_cache_dtype: ``"model"``, or ``"fp8"`` for 1.76 times as many tokens in the memory of
            a cache in bf16; see ``AbsorbedMLAOptions``.
        experts: How the experts of an MoE layer are computed: ``"grouped"``, all in two products
            (on a GPU: bfloat16, compute capability 9 or 10; with ``parity`` bfloat16 or float16,
            and ``tensor_parallel_size`` 1), or ``"sequential"``, one after the other. ``"auto"`` is
            grouped where that is possible.
        cuda_graphs: Whether decode steps are captured as CUDA graphs when the engine is built. Not
            on a CPU.
        prefill_graph_tokens: Most tokens of a step that reads prompts in which one CUDA graph holds
            the whole model; at most ``max_num_batched_tokens``. Needs ``cuda_graphs``. 0: one graph
            for each layer, of up to 512 tokens. None: 3,072, or 1,536 where prompts cannot attend
            expanded in a graph, or the tokens of a forward pass if they are fewer; 0 where the
            model or other options are against it. See docs/scheduler.md.

    Raises:
        ValueError: On construction, naming the option, what it got and what it accepts.
    """

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    dtype: str = "auto"
    device: str = "auto"
    follow_links: bool = False
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    cache_tokens: int | None = None
    host_cache_tokens: int = 0
    gpu_memory_utilization: float = 0.85
    enable_prefix_caching: bool = True
    prefix_cache_dir: str | Path | None = None
    prefix_cache_bytes: int = 2**36
    enable_chunked_prefill: bool = True
    decode_context_parallel: bool | str = False
    data_parallel_attention: bool = False
    prompt_logprobs: bool = False
    num_speculative_tokens: int = 0
    seed: int = 0
    parity: bool = False
    form: str = "auto"
    latent_cache_dtype: str = "model"
    experts: str = "auto"
    cuda_graphs: bool = False
    prefill_graph_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("tensor_parallel_size", 1),
            ("pipeline_parallel_size", 1),
            ("expert_parallel_size", 1),
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("cache_tokens", 64),
            ("num_speculative_tokens", 0),
            ("host_cache_tokens", 0),
            ("prefix_cache_bytes", 1),
            ("prefill_graph_tokens", 0),
        ):
            value = getattr(self, name)
            if value is None and getattr(LLMOptions, name) is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name, accepted in (
            ("follow_links", (False, True)),
            ("trust_remote_code", (False, True)),
            ("dtype", DTYPES),
            ("device", DEVICES),
            ("form", ("auto", "absorbed", "expanded")),
            ("latent_cache_dtype", LATENT_CACHE_DTYPES),
            ("experts", EXPERTS),
            ("decode_context_parallel", (False, True, "auto")),
        ):
            value = getattr(self, name)
            if value not in accepted:
                known = ", ".join(map(str, accepted))
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                "gpu_memory_utilization must be above 0 and at most 1, got "
                f"{self.gpu_memory_utilization}"
            )
        if self.tensor_parallel_size and self.tensor_parallel_size % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size must divide tensor_parallel_size "
                f"{self.tensor_parallel_size}, got {self.expert_parallel_size}"
            )
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise ValueError("prefix_cache_dir needs enable_prefix_caching=True, got False")
        if self.host_cache_tokens and (self.cuda_graphs or self.parity):
            raise ValueError(
                "host_cache_tokens must be 0 with cuda_graphs and parity, got "
                f"{self.host_cache_tokens}"
            )
        if self.parity and self.form == "expanded":
            raise ValueError("parity needs form 'absorbed' or 'auto', got 'expanded'")
        if self.cuda_graphs and (self.form == "expanded" or self.device == "cpu"):
            raise ValueError(
                f"cuda_graphs needs a GPU and form 'absorbed' or 'auto', got device "
                f"{self.device!r} and form {self.form!r}"
            )
        if self.prefill_graph_tokens:
            self._require_prefill_graphs()
        if self.decode_context_parallel is True and self.parity:
            raise ValueError("parity needs decode_context_parallel False, got True")
        if self.decode_context_parallel is True and self.tensor_parallel_size is not None:
            require_shares(self.tensor_parallel_size, 64)
        if self.data_parallel_attention:
            self._require_divided()
        for name in ("pipeline_parallel_size", "expert_parallel_size"):
            alone = name == "expert_parallel_size" and self.data_parallel_attention
            if self.cuda_graphs and getattr(self, name) > 1 and not alone:
                raise ValueError(f"cuda_graphs needs {name} 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LLMOptions:
        """Options by name.

        Raises:
            ValueError: If there is no such option, or a value is out of range.
        """
        names = [option.name for option in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"LLM has no option {', '.join(unknown)}; it has {', '.join(names)}")
        return cls(**given)

    def _require_prefill_graphs(self) -> None:
        """Refuse what graphs of steps that read prompts do not go with."""
        most = self.prefill_graph_tokens
        if most is not None and most > self.max_num_batched_tokens:
            raise ValueError(
                "prefill_graph_tokens must be at most max_num_batched_tokens "
                f"{self.max_num_batched_tokens}, got {most}"
            )
        for name, accepted in {
            "cuda_graphs": True,
            "num_speculative_tokens": 0,
            "decode_context_parallel": False,
            "data_parallel_attention": False,
        }.items():
            if getattr(self, name) not in (accepted, "auto"):
                raise ValueError(
                    f"{name} must be {accepted!r} with prefill_graph_tokens, got "
                    f"{getattr(self, name)!r}"
                )

    def _require_divided(self) -> None:
        """Refuse what data-parallel attention does not go with."""
        for name, accepted in _DIVIDED.items():
            value = getattr(self, name)
            if value not in (accepted, "auto"):
                raise ValueError(
                    f"{name} must be {accepted!r} with data_parallel_attention, got {value!r}"
                )
        if self.tensor_parallel_size == 1:
            raise ValueError(
                "data_parallel_attention needs tensor_parallel_size of at least 2, got 1"
            )

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
        return EngineOptions(
            max_sequence_length=longest,
            max_requests=self.max_num_seqs,
            cache_tokens=self.cache_tokens or min(useful, fitting),
            host_cache_tokens=self.host_cache_tokens,
            step_tokens=self.step_tokens,
            vocab_size=vocab_size,
            seed=self.seed,
            prompt_logprobs=self.prompt_logprobs,
            num_speculative_tokens=self.num_speculative_tokens,
            chunked_prefill=self.enable_chunked_prefill,
            prefix_caching=self.enable_prefix_caching,
            decode_context_parallel=self.decode_context_parallel,
            prefix_cache_dir=self.prefix_cache_dir,
            prefix_cache_bytes=self.prefix_cache_bytes,
            num_cuda_graphs=NUM_CUDA_GRAPHS if self.cuda_graphs else None,
            prefill_graph_tokens=self.prefill_graph_tokens or 0,
            # What ended requests leave in the cache is kept until the room is needed.
            inference_config={"prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU},
        )
