"""Small layers with DeepSeek Sparse Attention, and random weights for them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor

from absorbed_mla.context_parallel.strategy import LocalKeys
from absorbed_mla.core_attention.attend import AttentionPlan, attend
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.types import AttentionOutput
from absorbed_mla.dsa.backend import TopKBackend
from absorbed_mla.dsa.backends.reference import ENTRY as REFERENCE
from absorbed_mla.dsa.indexer import Indexer, IndexerSubmodules
from absorbed_mla.dsa.layer_norm import LayerNorm
from absorbed_mla.linear import DuplicatedLinear
from absorbed_mla.sequences import SequenceLayout
from tests import oracle
from tests.oracle import OracleMLA, Table, TokenSequence
from tests.oracle_dsa import OracleDSA
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.cases import VARIANTS as MLA_VARIANTS
from tests.support.cases import random_weights as random_weights

# Names of the indexer's weights in the oracle, and of its parameters, which are Megatron's.
PARAMETERS = {
    "i_wq": "linear_wq_b.weight",
    "i_wk": "linear_wk.weight",
    "i_k_gain": "k_norm.weight",
    "i_k_bias": "k_norm.bias",
    "i_w": "linear_weights_proj.weight",
}

# Fewer keys are chosen than most queries of the tests' layouts see.
TINY_DSA = OracleDSA(mla=TINY, heads=3, width=16, topk=2)
VARIANTS = {
    "deepseek": TINY_DSA,
    "glm": replace(TINY_DSA, interleaved=True, hadamard=False, k_norm_eps=1e-3),
    "no_relu": replace(TINY_DSA, relu=False, hadamard=False),
    "q_lora_none": replace(TINY_DSA, mla=replace(TINY, q_lora_rank=None)),
    "no_rope": replace(TINY_DSA, mla=replace(TINY, rope=0, rope_type="rope", mscale_all_dim=0.0)),
    "topk_above": replace(TINY_DSA, topk=64),
    "gated": replace(TINY_DSA, mla=replace(MLA_VARIANTS["all_variants"], rotated=False)),
}


def absorbed_rows(
    mla: OracleMLA, w: dict[str, Tensor], x: Tensor, table: Table
) -> tuple[Tensor, Tensor, Tensor]:
    """The absorbed form's inputs for one sequence [S, hidden], from the paper's equations.

    Returns:
        Absorbed query [S, H, C], rotated query [S, H, rope] and [latent | rotated key] [S, C+rope].
    """
    q_nope, q_rope = oracle.project_query(mla, w, x).split([mla.nope, mla.rope], dim=-1)
    latent, k_rope = (x @ w["w_dkv"].T).split([mla.kv_lora_rank, mla.rope], dim=-1)
    if mla.latent_norm:
        latent = oracle.rms_norm(latent, w["kv_norm"], mla.norm_eps)
    if mla.rope:
        q_rope = oracle.rotate(q_rope, table)
        k_rope = oracle.rotate(k_rope[:, None], table)[:, 0]
    w_uk = w["w_uk"].view(mla.heads, mla.nope, mla.kv_lora_rank)
    q_content = torch.einsum("shd,hdc->shc", q_nope, w_uk)
    return q_content, q_rope, torch.cat((latent, k_rope), dim=-1)


def by_sequence(sequences: Sequence[TokenSequence], rows: int, of_sequence) -> tuple[Tensor, ...]:
    """Tensors [rows, ...] put together from those of every sequence; zeros between sequences.

    Args:
        sequences: Where the tokens are.
        rows: Tokens in all, with those between sequences.
        of_sequence: Makes the tensors [S, ...] of one sequence.
    """
    made = [of_sequence(sequence) for sequence in sequences]
    found = []
    for parts in zip(*made, strict=True):
        whole = parts[0].new_zeros(rows, *parts[0].shape[1:])
        for sequence, part in zip(sequences, parts, strict=True):
            whole = whole.index_copy(0, sequence.rows.to(part.device), part)
        found.append(whole)
    return tuple(found)


def sparse_attention(
    q_content: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    chosen: Tensor,
    scale: float,
    sparse=REFERENCE,
) -> AttentionOutput:
    """Attention of a layer over the keys of a selection, with its gradient.

    Shapes: see ``sparse_reference.latent_inputs``; ``sparse`` is a ``SparseBackend``.
    """
    keys = LocalKeys(SequenceLayout.dense(len(kv)), causal=False)
    backend = TopKBackend(sparse, chosen)
    plan = AttentionPlan(AbsorbedForm(), backend, keys, ScoreRules(scale, Spans()))
    return attend(plan, (q_content, q_rope), kv, ())


def config_of(
    dsa: OracleDSA, dtype: torch.dtype = torch.float64, **changes
) -> MLATransformerConfig:
    """Megatron's config of such a layer."""
    return config_for(dsa.mla, dtype, **{**dsa_fields(dsa), **changes})


def dsa_fields(dsa: OracleDSA) -> dict[str, object]:
    """Megatron's fields of the sparse attention."""
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": dsa.heads,
        "dsa_indexer_head_dim": dsa.width,
        "dsa_indexer_topk": dsa.topk,
        "dsa_indexer_rope_interleaved": dsa.interleaved,
        "dsa_indexer_rotate_activation": dsa.hadamard,
        "dsa_indexer_scoring_relu": dsa.relu,
        "dsa_indexer_k_norm_epsilon": dsa.k_norm_eps,
    }


def build_indexer(dsa: OracleDSA, weights: dict[str, Tensor], **changes) -> Indexer:
    """Our indexer with the weights of the oracle, in float64."""
    linear = DuplicatedLinear
    indexer = Indexer(
        config_of(dsa, **changes),
        IndexerSubmodules(linear, linear, LayerNorm, linear),
        ProcessGroupCollection.use_mpu_process_groups(),
    )
    with torch.no_grad():
        for name, its in PARAMETERS.items():
            indexer.get_parameter(its).copy_(weights[name])
    assert {*dict(indexer.named_parameters())} == {*PARAMETERS.values()}
    return indexer.to(world.device())
