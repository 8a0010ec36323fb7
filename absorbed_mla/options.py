"""Options of a layer that Megatron's config has no field for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from absorbed_mla.registry import (
    ATTENTION_BACKENDS,
    CP_STRATEGIES,
    INDEXER_BACKENDS,
    PAGED_BACKENDS,
    SPARSE_BACKENDS,
)

FORMS = ("auto", "absorbed", "expanded")
DOWN_PROJECTIONS = ("duplicated", "column_parallel")
OUTPUT_GATES = (None, "headwise", "elementwise")
MUON_KV_UP = ("auto", "combined", "split", "per_head")
LATENT_CACHE_DTYPES = ("model", "fp8")
# Of the files that are there; a program may register more.
CORE_ATTENTION_BACKENDS = ("auto", *ATTENTION_BACKENDS.names())
PAGED_ATTENTION_BACKENDS = ("auto", *PAGED_BACKENDS.names())
# How context-parallel ranks exchange latents.
CP_COMM_TYPES = CP_STRATEGIES.names()
# What no field of Megatron's config says of a model's router.
ROUTER_OPTIONS = ("moe_router_group_score_topk", "moe_router_norm_topk_prob")
_SWITCHES = ("batch_invariant", "train_on_cached_latents", "k_rope_layernorm", "post_mlp_layernorm")
_CHUNK_SIZES = ("query_chunk_size", "expansion_chunk_size", "context_chunk_size")


@dataclass(frozen=True, kw_only=True)
class AbsorbedMLAOptions:
    """How to execute an MLA layer, and what of the model Megatron's config cannot say.

    ``latent_norm_eps``, ``attention_output_gate``, ``k_rope_layernorm``, ``llama_4_scaling_beta``,
    ``rope_factors``, ``post_mlp_layernorm`` and the two of the router belong to the model. Every
    choice of the others computes the same function of the same weights.

    Attributes:
        form: ``"absorbed"`` multiplies the query by W_UK and attends over the latent (multi-query
            attention); ``"expanded"`` expands keys and values from the latent (multi-head
            attention); ``"auto"`` takes the one with the least estimated time (``cost.py``). In
            fp16 the absorbed query, a product of two weights, may pass 65504 where keys do not.
        down_projection: ``"duplicated"`` keeps the whole Q and KV down-projections on every
            tensor-parallel rank, ``"column_parallel"`` shards their rows.
        latent_norm_eps: Epsilon of ``q_layernorm``, ``kv_layernorm`` and ``k_rope_layernorm``; None
            takes the config's ``layernorm_epsilon``. Hugging Face's DeepSeek models use 1e-6
            whatever the model's.
        attention_output_gate: Multiply the attention's output by the sigmoid of a projection of the
            layer's input, ``linear_gate``: ``"headwise"`` a number for each head (Ling 3, dots3),
            ``"elementwise"`` one for each channel of it (Kimi-K3, Hy4). None: no gate, unless the
            config's field of this name asks for the head-wise one.
        k_rope_layernorm: Whether ``k_rope`` passes an RMSNorm of its own before it is rotated
            (dots3's ``k_rope_only_layernorm``).
        llama_4_scaling_beta: Multiply a query at position p by 1 + beta * log(1 + floor(p / the
            config's ``original_max_position_embeddings``)) (Mistral Small 4). None: no scaling.
        rope_factors: A tuple of what divides each rotary frequency, one for every two rope channels
            (LongRoPE's ``short_factor``, MiniCPM3), with ``rope_type="rope"``. None: nothing.
        core_attention_backend: The implementation of the attention, one of the files in
            ``core_attention/backends``; docs/support.md says what each needs. All but
            ``"reference"`` (plain PyTorch, either form) compute one form, in fp16 and bf16 on a
            GPU, without mask and dropout. ``"auto"`` takes the least estimated time of those that
            can run.
        query_chunk_size: Query tokens whose scores the reference backend holds at a time.
        expansion_chunk_size: Heads times key tokens whose keys and values the expanded form holds
            at a time, at least one head, and an eighth more where that makes fewer and equal
            pieces. The default is 640 MiB at DeepSeek-V3's dimensions.
        paged_attention_backend: The implementation of the absorbed form over a latent cache
            (inference), one of the files in ``inference/backends``; ``"auto"`` takes the fastest
            that can run.
        context_chunk_size: Tokens of cached context that the expanded form gathers and expands at a
            time in inference. The default is 72 MiB of latents at DeepSeek-V3's dimensions.
        latent_cache_tokens: Positions of each request whose latents stay on the device in a
            ``StaticInferenceContext``; those behind live in pinned host memory, and attention
            streams them. None: all stay on the device.
        latent_cache_dtype: ``"model"`` caches latents in the parameters' dtype, ``"fp8"`` in e4m3
            with scales, 656 bytes per token and layer instead of 1152 at DeepSeek-V3's dimensions
            (``fp8_latents.py``).
        train_on_cached_latents: Whether training attends to latents as the cache would return them,
            rounded to ``latent_cache_dtype``; their gradient passes straight through. Rollout over
            an FP8 cache and training then compute the same function.
        batch_invariant: Parity mode (docs/parity.md): a token's output is bitwise the same in
            training, prefill and decode, whatever else is in the batch. Absorbed form throughout.
        muon_kv_up: What Muon orthogonalises as one matrix (docs/muon.md): ``"combined"`` the K and
            V up-projections of all heads together, as in standard MLA; ``"split"`` each of the two;
            ``"per_head"`` each head's rows of each. ``"auto"`` is combined, but for a Megatron
            whose Muon cannot be made to follow, where it is logged; the layer refuses other values
            there. Other optimizers do not read it.
        sparse_attention_backend: With DeepSeek Sparse Attention, the implementation of the
            attention over chosen keys, one of the files in ``dsa/backends``; ``"auto"`` takes the
            fastest that can run.
        indexer_backend: Likewise of the indexer's selection and loss, in
            ``dsa/indexer_backends``.
        moe_router_group_score_topk: With ``moe_router_num_groups``, the number of a group's best
            experts whose scores' sum ranks it: 1 in DeepSeek-V2, 2 in DeepSeek-V3. None takes
            Megatron's, ``moe_router_topk // moe_router_group_topk`` (``deepseek_router.py``).
        moe_router_norm_topk_prob: Whether the scores of a token's experts are divided by their sum,
            ``norm_topk_prob`` of config.json. None takes Megatron's rule: sigmoid scores of
            several experts are, others are not.
        post_mlp_layernorm: Whether the sum of routed and shared experts passes an RMSNorm before it
            is added to the residual stream (A.X-K1); dense layers have none.

    Raises:
        ValueError: On construction, naming the option, what it got and what it accepts.
    """

    form: str = "auto"
    down_projection: str = "duplicated"
    latent_norm_eps: float | None = None
    attention_output_gate: str | None = None
    k_rope_layernorm: bool = False
    llama_4_scaling_beta: float | None = None
    rope_factors: tuple[float, ...] | None = None
    core_attention_backend: str = "auto"
    query_chunk_size: int = 256
    expansion_chunk_size: int = 2**20
    paged_attention_backend: str = "auto"
    context_chunk_size: int = 2**16
    latent_cache_tokens: int | None = None
    latent_cache_dtype: str = "model"
    train_on_cached_latents: bool = False
    batch_invariant: bool = False
    muon_kv_up: str = "auto"
    sparse_attention_backend: str = "auto"
    indexer_backend: str = "auto"
    moe_router_group_score_topk: int | None = None
    moe_router_norm_topk_prob: bool | None = None
    post_mlp_layernorm: bool = False

    def __post_init__(self) -> None:
        _require_one_of("form", self.form, FORMS)
        _require_one_of("down_projection", self.down_projection, DOWN_PROJECTIONS)
        _require_one_of("attention_output_gate", self.attention_output_gate, OUTPUT_GATES)
        _require_one_of("muon_kv_up", self.muon_kv_up, MUON_KV_UP)
        _require_one_of("latent_cache_dtype", self.latent_cache_dtype, LATENT_CACHE_DTYPES)
        ATTENTION_BACKENDS.require(self.core_attention_backend, "auto")
        self._require_fitting_form()
        PAGED_BACKENDS.require(self.paged_attention_backend, "auto")
        SPARSE_BACKENDS.require(self.sparse_attention_backend, "auto")
        INDEXER_BACKENDS.require(self.indexer_backend, "auto")
        eps = self.latent_norm_eps
        if eps is not None and not (isinstance(eps, (int, float)) and 0 < eps < 1):
            raise ValueError(f"latent_norm_eps must be None or between 0 and 1, got {eps!r}")
        beta = self.llama_4_scaling_beta
        if beta is not None and not (isinstance(beta, (int, float)) and 0 < beta < math.inf):
            raise ValueError(f"llama_4_scaling_beta must be None or above 0, got {beta!r}")
        if (factors := self.rope_factors) is not None and not (
            isinstance(factors, tuple)
            and all(isinstance(f, (int, float)) and 0 < f < math.inf for f in factors)
        ):
            raise ValueError(
                f"rope_factors must be None or a tuple of numbers above 0, got {factors!r}"
            )
        for name in _CHUNK_SIZES:
            chunk = getattr(self, name)
            if not _is_count(chunk):
                raise ValueError(f"{name} must be an integer of at least 1, got {chunk!r}")
        for name in ("latent_cache_tokens", "moe_router_group_score_topk"):
            count = getattr(self, name)
            if count is not None and not _is_count(count):
                raise ValueError(f"{name} must be None or an integer of at least 1, got {count!r}")
        normalised = self.moe_router_norm_topk_prob
        if not (normalised is None or isinstance(normalised, bool)):
            raise ValueError(
                f"moe_router_norm_topk_prob must be None, True or False, got {normalised!r}"
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.train_on_cached_latents and self.latent_cache_dtype == "model":
            raise ValueError(
                "train_on_cached_latents=True needs latent_cache_dtype='fp8', got 'model', which "
                "rounds nothing"
            )

    def _require_fitting_form(self) -> None:
        """Refuse a backend that computes the other form only."""
        if self.form == "auto" or self.core_attention_backend == "auto":
            return
        forms = ATTENTION_BACKENDS[self.core_attention_backend].forms
        if self.form not in forms:
            fitting = [entry.name for entry in ATTENTION_BACKENDS if self.form in entry.forms]
            raise ValueError(
                f"core_attention_backend={self.core_attention_backend!r} computes "
                f"form={forms[0]!r} only, got form={self.form!r}, for which it must be one of "
                f"auto, {', '.join(fitting)}"
            )

    @property
    def of_experts(self) -> dict[str, object]:
        """The options of mixtures of experts that are not left to Megatron."""
        given = {name: getattr(self, name) for name in ROUTER_OPTIONS}
        given["post_mlp_layernorm"] = self.post_mlp_layernorm or None
        return {name: value for name, value in given.items() if value is not None}

    @property
    def chooses_experts(self) -> bool:
        """Whether an option of the router is set, so that Megatron's own will not do."""
        return any(getattr(self, name) is not None for name in ROUTER_OPTIONS)

    @classmethod
    def coerce(cls, options: AbsorbedMLAOptions | None) -> AbsorbedMLAOptions:
        """Return ``options``, or the defaults for None."""
        if options is None:
            return cls()
        if not isinstance(options, cls):
            raise ValueError(f"options must be an AbsorbedMLAOptions or None, got {options!r}")
        return options

    def replace(self, **changes) -> AbsorbedMLAOptions:
        """Return a copy with some options changed."""
        return dataclasses.replace(self, **changes)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require_one_of(name: str, value: object, accepted: tuple[str | None, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(str, accepted))}; got {value!r}")
