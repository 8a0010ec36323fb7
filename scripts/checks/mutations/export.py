"""Weights of a live model under Hugging Face's names."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "export_heads_of_tied_models": Mutation(
        "absorbed_mla/serving/export/live.py",
        "not model.share_embeddings_and_output_weights",
        "True",
    ),
    "export_rank_0_leaves_unseen": Mutation(
        "absorbed_mla/serving/export/iteration.py",
        "dist.get_rank() + 1]",
        "dist.get_rank()]",
    ),
    "export_without_router_options": Mutation(
        "absorbed_mla/serving/export/live.py",
        "_arguments(model) | dict(zip(ROUTER_OPTIONS, router, strict=True))",
        "_arguments(model)",
    ),
    "export_unwraps_once": Mutation(
        "absorbed_mla/serving/export/live.py",
        "        while not isinstance(inner, GPTModel) and",
        "        if not isinstance(inner, GPTModel) and",
    ),
    "export_with_gradients": Mutation(
        "absorbed_mla/serving/export/shards.py",
        "= data.detach(), shard.size",
        "= data, shard.size",
    ),
    "export_of_any_tensor": Mutation(
        "absorbed_mla/serving/export/live.py",
        "not in (Tensor, nn.Parameter) and not is_float8tensor(shard.data)",
        "is None",
    ),
    "export_scales_as_powers_of_two": Mutation(
        "absorbed_mla/serving/export/weights.py",
        "return SCALE_FORMATS[0] if fp8",
        "return SCALE_FORMATS[1] if fp8",
    ),
}
