"""Refusals: what goes with dense attention and not with DeepSeek Sparse Attention."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.unsupported import refuse_fields

# Config field -> (supported values, what holds or what to do instead).
_CONFIG_FIELDS: dict[str, tuple[tuple, str]] = {
    "dsa_kernel_backend": (
        ("none",),
        "it names Megatron's own kernels; see AbsorbedMLAOptions.sparse_attention_backend",
    ),
    "window_size": ((None,), "the indexer chooses among all keys before a token"),
    "attention_dropout": ((0.0,), "probabilities of chosen keys are not dropped"),
    "fp8": ((None, False), "an indexer in FP8 was not tested"),
    "qk_clip": ((False,), "the largest scores are not recorded"),
    "log_max_attention_logit": ((False,), "the largest scores are not recorded"),
}


def refuse_unsupported_dsa(
    config: MLATransformerConfig, options: AbsorbedMLAOptions, *, causal: bool, cp_comm_type: str
) -> None:
    """Refuse what sparse attention cannot do, or would ignore.

    Raises:
        ValueError: Naming the option, what it is and what is supported.
    """
    refuse_fields("experimental_attention_variant='dsa'", config, _CONFIG_FIELDS)
    if not causal:
        raise ValueError(
            "experimental_attention_variant='dsa' needs a causal attn_mask_type: the indexer "
            "chooses among a token and those before it"
        )
    sparse = getattr(config, "dsa_indexer_use_sparse_loss", False)
    if config.softmax_type != "vanilla" and config.dsa_indexer_loss_coeff and not sparse:
        raise ValueError(
            "dsa_indexer_use_sparse_loss must be True, or dsa_indexer_loss_coeff 0, for "
            f"softmax_type={config.softmax_type!r} with experimental_attention_variant='dsa', got "
            "False: over keys that the attention left out, the sink is not part of the target"
        )
    if cp_comm_type != "all_gather":
        raise ValueError(
            f"cp_comm_type must be all_gather for experimental_attention_variant='dsa', got "
            f"{cp_comm_type!r}: a query may choose keys of any rank, so every rank needs all"
        )
    if options.form == "expanded":
        raise ValueError(
            "form must be auto or absorbed for experimental_attention_variant='dsa', got "
            "'expanded': all heads of a query share the chosen latents"
        )
    if options.latent_cache_tokens is not None:
        raise ValueError(
            "latent_cache_tokens must be None for experimental_attention_variant='dsa', got "
            f"{options.latent_cache_tokens}: any token may be chosen, and is read on the device"
        )
