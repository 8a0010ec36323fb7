"""The recipes, in the order of the report."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from absorbed_mla.qk_clip import clip_qk
from checks.recipes import model, notes, uses, wrappers
from checks.recipes.recipe import MUON_ROUNDING, Layout, Recipe
from checks.recipes.training import train

PIPELINE, EXPERTS = "pipeline_model_parallel_size", "expert_model_parallel_size"
ONE = Layout("one process", replicated=True)
DP = Layout("DP 2")
TP = Layout("TP 2 + SP", {"tp": 2})
PP = Layout("PP 2", {PIPELINE: 2})
VPP = Layout("PP 2, VPP 2", {PIPELINE: 2, "virtual_pipeline_model_parallel_size": 2})
EP = Layout("EP 2", {EXPERTS: 2})


def needs_gpu() -> str:
    """Why a recipe of GPUs cannot run here."""
    return "" if torch.cuda.is_available() else "it needs GPUs"


def needs_transformer_engine() -> str:
    """Why a recipe of TransformerEngine's layers cannot run here."""
    return needs_gpu() or ("" if HAVE_TE else "it needs TransformerEngine")


def needs_muon() -> str:
    """Why Muon cannot run here."""
    return "" if find_spec("emerging_optimizers") else "emerging_optimizers is not installed"


def _plain(name: str, layout: Layout, reference: Recipe | None = None, **more) -> Recipe:
    return Recipe(
        name,
        layout,
        run=train,
        build=model.gpt_chunks,
        wrap=wrappers.ddp,
        reference=reference,
        exact=False,
        **more,
    )


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
# Megatron's mark at the MLP's norm makes autograd sum gradients in another order.
_LAYER = (*_ATTENTION, "mlp_norm")
_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


def _distributed_optimizers() -> list[Recipe]:
    plain = _PLAIN["DP"]
    step = {"overlap_param_gather_with_optimizer_step": True}
    return [
        plain.variant(
            "distributed optimizer", exact=True, ddp=_DISTRIBUTED, optimizer=_DISTRIBUTED
        ),
        plain.variant(
            "distributed optimizer, overlapped", exact=True, ddp=_OVERLAPPED, optimizer=_GATHER
        ),
        _PLAIN["VPP"].variant(
            "distributed optimizer, overlapped with its step",
            exact=True,
            ddp=_OVERLAPPED,
            optimizer={**_GATHER, **step},
        ),
        _PLAIN["EP"].variant(
            "distributed optimizer, overlapped, experts",
            exact=True,
            ddp=_OVERLAPPED,
            optimizer=_GATHER,
        ),
    ]


def _delayed_gradients() -> list[Recipe]:
    # Megatron overlaps in bf16 only.
    plain = _plain("plain EP in bf16", EP, experts=True, bf16=True)
    overlap = {"overlap_moe_expert_parallel_comm": True}
    delay = {**overlap, "delay_wgrad_compute": True}
    return [
        plain.variant("experts overlapped", exact=True, config=overlap),
        plain.variant(
            "experts overlapped, delayed gradients",
            exact=True,
            config=delay,
            ddp={"delay_wgrad_compute": True},
        ),
    ]


def _offloading() -> list[Recipe]:
    def fine(*modules: str, **more) -> dict:
        chosen = {"offload_modules": list(modules), "min_offloaded_tensor_size": 1024}
        return {"fine_grained_activation_offloading": True, **chosen, **more}

    half = {
        "cpu_offloading": True,
        "cpu_offloading_num_layers": model.LAYERS // 2,
        # So that they can be counted afterwards.
        "cpu_offloading_retain_pinned_cpu_buffers": True,
    }
    every = {"missing": needs_transformer_engine, "exact": True}
    fine_grained = {**every, "note": notes.offloaded}
    return [
        _PLAIN["DP"].variant(
            "CPU offloading of layers", config=half, note=notes.layers_offloaded, **every
        ),
        _PLAIN["DP"].variant("fine-grained offloading", config=fine(*_ATTENTION), **fine_grained),
        _PLAIN["DP"].variant(
            "fine-grained offloading, mla_up_proj recomputed",
            config=fine(*_ATTENTION, **_RECOMPUTE),
            **fine_grained,
        ),
        _PLAIN["TP"].variant(
            "fine-grained offloading, TP", config=fine(*_ATTENTION), **fine_grained
        ),
        _PLAIN["EP"].variant(
            "fine-grained offloading, experts",
            config=fine(*_LAYER, "expert_fc1", "moe_act"),
            **{**fine_grained, "exact": False},
        ),
    ]


def _sharded() -> list[Recipe]:
    megatron = {
        f"Megatron-FSDP, {strategy}": {
            "wrap": wrappers.megatron_fsdp,
            "ddp": {
                "data_parallel_sharding_strategy": strategy,
                "overlap_grad_reduce": True,
                "overlap_param_gather": gather,
            },
            "optimizer": {**_DISTRIBUTED, "overlap_param_gather": gather},
        }
        for strategy, gather in (
            ("optim", False),
            ("optim_grads", False),
            ("optim_grads_params", True),
        )
    }
    pytorch = {"PyTorch's FSDP2": {"wrap": wrappers.torch_fsdp}}
    return [_PLAIN["DP"].variant(name, **fields) for name, fields in (megatron | pytorch).items()]


def _clipped() -> Recipe:
    clip = {"qk_clip": True, "qk_clip_threshold": 0.01}
    plain = _plain("QK-clip", DP, config=clip, after_step=clip_qk)
    return plain.variant(
        "QK-clip with the distributed optimizer",
        exact=True,
        ddp=_DISTRIBUTED,
        optimizer=_DISTRIBUTED,
    )


def _muon() -> list[Recipe]:
    """Muon's matrices belong to whole ranks."""
    muon = {"optimizer": "muon", "muon_tp_mode": "duplicated", "muon_fp32_matmul_prec": "highest"}
    plain = _plain("Muon in one process", ONE, optimizer=muon)
    more = {"optimizer": muon, "missing": needs_muon, "rounding": MUON_ROUNDING}
    return [_plain("Muon, DP", DP, plain, **more), _plain("Muon, TP", TP, plain, **more)]


def _uses(name: str, run) -> list[Recipe]:
    """What one process does with the same weights."""
    cached = {"cache_mla_latents": True}
    alone = _plain(f"{name} of one process", ONE, experts=True, config=cached)
    alone = alone.variant(alone.name, run=run)
    return [
        alone.variant(f"{name}, {layout.name}", layout=layout, exact=True)
        for layout in ((TP, PP, EP) if run is uses.export else (PP, EP))
    ]


def all_recipes() -> list[Recipe]:
    """Every recipe that is in the report."""
    return [
        *_PLAIN.values(),
        *_distributed_optimizers(),
        *_delayed_gradients(),
        _PLAIN["DP"].variant(
            "gradient_accumulation_fusion",
            build=model.fused_chunks,
            config={"gradient_accumulation_fusion": True},
            note=notes.fused,
            missing=needs_transformer_engine,
        ),
        *_offloading(),
        *_sharded(),
        _clipped(),
        *_muon(),
        _PLAIN["TP"].variant("HybridModel, TP", exact=True, build=model.hybrid_chunks),
        *_uses("export", uses.export),
        *_uses("generation", uses.generate),
    ]
