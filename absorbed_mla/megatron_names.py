"""Megatron's private names that this package uses: releases that have each, features that need it.

Another release of Megatron may have other names. Each is in a table, by what cannot run without
it: the layer's in this file, ``batch_invariant/megatron_operators.py`` has those of the
batch-invariant mode and ``serving/megatron_engine/`` those of the inference engine. Nothing else
touches a private name of Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Releases whose sources were looked through: 0.19.0, 0.19.2, and the development of 0.20
# as of 2026-08-22.
EVERY = ("0.19", "0.20")
UNTIL_0_19 = ("0.19",)


@dataclass(frozen=True)
class MegatronName:
    """A name of a class or module of Megatron's.

    Attributes:
        owner: Dotted path of the class or module.
        name: Of the attribute.
        replaced_by: What takes its place; ``""``: it is called, read or written only.
        versions: Releases that have it, of those that were looked through.
        or_else: The name of other releases; ``""``: there is none.
    """

    owner: str
    name: str
    replaced_by: str = ""
    versions: tuple[str, ...] = EVERY
    or_else: str = ""

    def missing_in(self, owner: object) -> str:
        """What an error says if the class, one of its objects, or the module lacks it; or ``""``.

        Such as ``"megatron-core 0.21.0 has no DynamicInferenceEngine._add_request (0.19 to 0.20
        have it)"``.
        """
        if hasattr(owner, self.name) or (self.or_else and hasattr(owner, self.or_else)):
            return ""
        from megatron.core import __version__

        path, _, own = self.owner.rpartition(".")
        shown = own if own[0].isupper() else f"{path}.{own}"
        known = " to ".join(dict.fromkeys((self.versions[0], self.versions[-1])))
        have = "have" if len(self.versions) > 1 else "has"
        return f"megatron-core {__version__} has no {shown}.{self.name} ({known} {have} it)"

    def of(self, owner: object) -> Any:
        """The attribute of an object, class or module."""
        return getattr(owner, self.name)

    def replace(self, owner: object, value: object) -> None:
        """Put something in the attribute's place."""
        assert self.replaced_by, f"{self.name} is declared as read only"
        setattr(owner, self.name, value)


def names(owner: str, words: str, versions: tuple[str, ...] = EVERY) -> tuple[MegatronName, ...]:
    """The names in ``words``, which blanks separate, of one class or module."""
    return tuple(MegatronName(owner, word, versions=versions) for word in words.split())


@dataclass(frozen=True)
class Need:
    """A feature that cannot run without some private names.

    Attributes:
        what: The option or class, as errors name it.
        without: What becomes of it on a Megatron that lacks one of the names.
        names: That it uses.
    """

    what: str
    without: str
    names: tuple[MegatronName, ...]

    def missing(self, owners: Mapping[str, object]) -> str:
        """As :meth:`MegatronName.missing_in`, of the first name that is missing, or ``""``.

        Args:
            owners: By dotted path, the class, module or object to look into. Names of owners that
                are not there are passed over.
        """
        found = (n.missing_in(owners[n.owner]) for n in self.names if n.owner in owners)
        return next(filter(None, found), "")

    def require(self, owners: Mapping[str, object]) -> None:
        """Refuse to run without one of the names.

        Args:
            owners: As of :meth:`missing`.

        Raises:
            ValueError: Naming the first one that is missing.
        """
        if missing := self.missing(owners):
            raise ValueError(f"{self.what} cannot run: {missing}")


REFUSED = "it is refused"

_CORE = "megatron.core"
ATTENTION = f"{_CORE}.transformer.attention.Attention"
CONTEXT = f"{_CORE}.inference.contexts.dynamic_context.DynamicInferenceContext"
ALLOCATOR = f"{_CORE}.inference.contexts.kv_block_allocator.KVBlockAllocator"
RANDOM = f"{_CORE}.tensor_parallel.random"
COMMUNICATION = f"{_CORE}.inference.communication_utils"
DISPATCHER = f"{_CORE}.transformer.moe.token_dispatcher"
OPTIMIZERS = f"{_CORE}.optimizer.emerging_optimizers"
PREDICTION = f"{_CORE}.transformer.multi_token_prediction"
ROUTER = f"{_CORE}.transformer.moe.router.TopKRouter"
ROUTING = f"{_CORE}.transformer.moe.router"
BUILDER = "megatron.training.models.gpt"

PP_LAYER_OFFSET = MegatronName(ATTENTION, "_get_pp_layer_offset_for_inference")
ALLOCATE_MEMORY = MegatronName(CONTEXT, "_allocate_memory_buffer", "memory of this package")
INITIALIZE_STEP = MegatronName(CONTEXT, "initialize_attention_state", "the same; blocks get places")
ALLOCATE_BLOCKS = MegatronName(ALLOCATOR, "allocate_memory_blocks", "the same; they are empty")
GET_RNG_STATE = MegatronName(RANDOM, "_get_cuda_rng_state", "the CPU's state")
SET_RNG_STATE = MegatronName(RANDOM, "_set_cuda_rng_state", "the CPU's state")
SHARE_STORAGE = MegatronName(RANDOM, "_get_share_storage", "a copy without a compiler")
IS_CUDA = MegatronName(COMMUNICATION, "_is_cuda", "no check")
MOVE_COUNTS = MegatronName(DISPATCHER, "maybe_move_tensor_to_cpu", "no move")
MUON_REGISTRY = MegatronName(OPTIMIZERS, "_EMERGING_OPTIMIZERS")
ROLL_TENSOR = MegatronName(PREDICTION, "roll_tensor", "a shift for padded packs")
EXPERT_BIAS = MegatronName(ROUTER, "_apply_expert_bias", "one that takes a mask")
CHOOSE_EXPERTS = MegatronName(ROUTING, "topk_routing_with_score_function", "a choice by options")
REPLAYED_CHOICE = MegatronName(ROUTER, "router_replay", "a choice that is seen, or given")
MTP_BLOCK_SPEC = MegatronName(BUILDER, "mtp_block_spec", "the spec of absorbed MLA")

# The layer cannot do without these: it runs under Megatron's own engine and training loop as well,
# where nobody else tells it the offset of its stage, gives contexts the memory, or lets padded
# packs, optimizers and experts' choices be what they are.
GENERATION = Need("generation", REFUSED, (PP_LAYER_OFFSET,))
INDEX_KEYS = Need(
    "a cache of index keys",
    REFUSED,
    (
        ALLOCATE_MEMORY,
        *names(
            CONTEXT, "_offloadable_cpu_backups _offloadable_tensor_names _uses_torch_memory_saver"
        ),
    ),
)
DECODE_CONTEXT_PARALLEL = Need("decode_context_parallel=True", REFUSED, (ALLOCATE_MEMORY,))
# Asked of the class, of the object that allocates, and of the object that is built.
KV_OFFLOAD = Need("host_cache_tokens", REFUSED, (ALLOCATE_MEMORY, INITIALIZE_STEP))
KV_OFFLOAD_MEMORY = Need(
    "host_cache_tokens",
    REFUSED,
    (
        ALLOCATE_BLOCKS,
        *names(ALLOCATOR, "total_count total_avail", UNTIL_0_19),
        *names(ALLOCATOR, "block_bag"),
        *names(
            CONTEXT,
            "block_size_tokens kv_block_allocator kv_reduced_dim layer_map max_requests "
            "num_attention_layers params_dtype",
        ),
    ),
)
KV_OFFLOAD_STEPS = Need(
    "host_cache_tokens", REFUSED, names(CONTEXT, "padded_active_request_count token_to_block_idx")
)
CPU_HOST = Need(
    "enable_cpu_host",
    "Megatron's own function stays",
    (GET_RNG_STATE, SET_RNG_STATE, SHARE_STORAGE, IS_CUDA, MOVE_COUNTS),
)
MUON = Need("muon_kv_up", "Megatron's Muon does not follow it", (MUON_REGISTRY,))
PACKED_MTP = Need("mtp_num_layers", REFUSED, (ROLL_TENSOR,))
EXPERT_BIAS_OF_PACKS = Need("moe_router_enable_expert_bias", REFUSED, (EXPERT_BIAS,))
CHOICE_OF_EXPERTS = Need(
    "moe_router_group_score_topk and moe_router_norm_topk_prob", REFUSED, (CHOOSE_EXPERTS,)
)
ROUTER_REPLAY = Need(
    "replay_routed_experts and enable_return_routed_experts", REFUSED, (REPLAYED_CHOICE,)
)
GPT_BUILDER = Need("AbsorbedMLAGPTModelBuilder", REFUSED, (MTP_BLOCK_SPEC,))


def used_by(owner: type | Callable) -> SimpleNamespace:
    """An object with each attribute that the methods of a class, or a function, ask for by name.

    For :meth:`Need.missing`, where no object has the attributes yet.
    """
    functions = vars(owner).values() if isinstance(owner, type) else [owner]
    codes = (getattr(one, "__code__", None) for one in functions)
    return SimpleNamespace(**dict.fromkeys(n for code in codes if code for n in code.co_names))


def is_kept_by_memory_saver(context: Any) -> bool:
    """Whether torch_memory_saver keeps what an inference context caches while it is offloaded."""
    return context._uses_torch_memory_saver


def keep_offloaded(context: Any, name: str, copy: Tensor) -> None:
    """Have an inference context that is offloaded copy a tensor to host memory, and back.

    Args:
        context: Megatron's ``DynamicInferenceContext``.
        name: The context's attribute that is the tensor.
        copy: Memory for it on the host.
    """
    context._offloadable_tensor_names.add(name)
    context._offloadable_cpu_backups[name] = copy
