"""The recipes."""

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from tests.support.recipes import model, training, wrappers
from tests.support.recipes.recipe import Layout, Recipe

PIPELINE, EXPERTS = "pipeline_model_parallel_size", "expert_model_parallel_size"
ONE = Layout("one process", replicated=True)
DP = Layout("DP 2")
TP = Layout("TP 2 + SP", {"tp": 2})
PP = Layout("PP 2", {PIPELINE: 2})
VPP = Layout("PP 2, VPP 2", {PIPELINE: 2, "virtual_pipeline_model_parallel_size": 2})
EP = Layout("EP 2", {EXPERTS: 2})


def needs_transformer_engine() -> str:
    """Why a recipe of TransformerEngine's layers cannot run here."""
    if not torch.cuda.is_available():
        return "it needs GPUs"
    return "" if HAVE_TE else "it needs TransformerEngine"


def _megatron_fsdp_needs_gpus() -> str:
    """Its sharded weights break a CPU process's heap, once in about 20 runs (Megatron 0.19.2)."""
    return "" if torch.cuda.is_available() else "it needs GPUs"


def _plain(name: str, layout: Layout, reference: Recipe | None = None, **more) -> Recipe:
    parts = training.train, model.gpt_chunks, wrappers.ddp
    return Recipe(name, layout, *parts, reference=reference, exact=False, **more)


_DENSE = _plain("plain, dense", ONE)
_MOE = _plain("plain, experts", ONE, experts=True)
_PLAIN = {
    "DP": _plain("plain DP", DP, _DENSE),
    "TP": _plain("plain TP", TP, _DENSE),
    "PP": _plain("plain PP", PP, _DENSE),
    "VPP": _plain("plain VPP", VPP, _DENSE),
    "EP": _plain("plain EP", EP, _MOE, experts=True),
}

_DISTRIBUTED = {"use_distributed_optimizer": True}
_GATHER = {**_DISTRIBUTED, "overlap_param_gather": True}
_OVERLAPPED = {**_GATHER, "overlap_grad_reduce": True}
_ATTENTION = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


def _distributed_optimizers() -> list[Recipe]:
    name, overlapped = "distributed optimizer", {"ddp": _OVERLAPPED, "exact": True}
    step = {**_GATHER, "overlap_param_gather_with_optimizer_step": True}
    sharded = {"ddp": _DISTRIBUTED, "optimizer": _DISTRIBUTED, "exact": True}
    return [
        _PLAIN["DP"].variant(name, **sharded),
        _PLAIN["DP"].variant(f"{name}, overlapped", optimizer=_GATHER, **overlapped),
        _PLAIN["VPP"].variant(f"{name}, overlapped with its step", optimizer=step, **overlapped),
        _PLAIN["EP"].variant(f"{name}, overlapped, experts", optimizer=_GATHER, **overlapped),
    ]


def _delayed_gradients() -> list[Recipe]:
    # Megatron overlaps in bf16 only.
    plain = _plain("plain EP in bf16", EP, experts=True, bf16=True)
    overlap, delay = {"overlap_moe_expert_parallel_comm": True}, {"delay_wgrad_compute": True}
    name = "experts overlapped"
    return [
        plain.variant(name, exact=True, config=overlap),
        plain.variant(f"{name}, delayed gradients", exact=True, config=overlap | delay, ddp=delay),
    ]


def _offloading() -> list[Recipe]:
    def fine(layout: str, more: str, *modules: str, exact: bool = True, **config) -> Recipe:
        offload = {"offload_modules": list(modules), "min_offloaded_tensor_size": 1024}
        return _PLAIN[layout].variant(
            f"fine-grained offloading{more}",
            config={"fine_grained_activation_offloading": True, **offload, **config},
            check=training.offloaded,
            missing=needs_transformer_engine,
            exact=exact,
        )

    half = {
        "cpu_offloading": True,
        "cpu_offloading_num_layers": model.LAYERS // 2,
        # So that they can be counted afterwards.
        "cpu_offloading_retain_pinned_cpu_buffers": True,
    }
    # Megatron's mark at the MLP's norm makes autograd sum gradients in another order.
    experts = (*_ATTENTION, "mlp_norm", "expert_fc1", "moe_act")
    return [
        _PLAIN["DP"].variant(
            "CPU offloading of layers",
            config=half,
            check=training.layers_offloaded,
            missing=needs_transformer_engine,
            exact=True,
        ),
        fine("DP", "", *_ATTENTION),
        fine("DP", ", mla_up_proj recomputed", *_ATTENTION, **_RECOMPUTE),
        fine("TP", ", TP", *_ATTENTION),
        fine("EP", ", experts", *experts, exact=False),
    ]


def _sharded() -> list[Recipe]:
    found = []
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        gather = {"overlap_param_gather": strategy == "optim_grads_params"}
        reduce = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True}
        found.append(
            _PLAIN["DP"].variant(
                f"Megatron-FSDP, {strategy}",
                wrap=wrappers.megatron_fsdp,
                missing=_megatron_fsdp_needs_gpus,
                ddp=reduce | gather,
                optimizer=_DISTRIBUTED | gather,
            )
        )
    return [*found, _PLAIN["DP"].variant("PyTorch's FSDP2", wrap=wrappers.torch_fsdp)]


def all_recipes() -> list[Recipe]:
    return [
        *_PLAIN.values(),
        *_distributed_optimizers(),
        *_delayed_gradients(),
        _PLAIN["DP"].variant(
            "gradient_accumulation_fusion",
            build=model.fused_chunks,
            config={"gradient_accumulation_fusion": True},
            check=training.fused,
            missing=needs_transformer_engine,
        ),
        *_offloading(),
        *_sharded(),
    ]
