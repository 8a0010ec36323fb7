"""The oracle of sparse attention against Megatron's own ``DSAttention`` (0.19.2), on a CPU.

What Megatron does differently:

- Scores, softmax and losses are float32 at any dtype, hence the bounds. The head weights, with
  their factors Hi^-1/2 Di^-1/2, are computed in the dtype of the parameters.
- The epsilon of the keys' LayerNorm is ``dsa_indexer_k_norm_epsilon``, or ``layernorm_epsilon``.
- ``rotate_activation`` wants bf16 and a package; it is replaced by the matrix product here.
- Interleaved channels are written half-split, in queries and keys alike: products are the same,
  but for a Hadamard transform behind it, which no model has with interleaved channels.
- The attention is over the chosen keys in both stages; ``dsa_indexer_use_sparse_loss=False``
  changes the loss alone. The warm-up proper needs a top-k of the sequence length.
- The logarithm of the target is cut off at 1e-10: a difference below 4e-11 for each key.
- A row is a token unless ``packed_seq_params.real_token_mask_q``, which no field declares, says
  otherwise: the padding of a pack counts in the mean, sees the keys of its slot, and has a loss.
- Ties are broken as ``torch.topk`` does.
- ``compute_dsa_indexer_loss`` adds its masks to the scores in place.
"""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa as megatron
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from absorbed_mla.linear import DuplicatedLinear
from tests import oracle_dsa
from tests.oracle_dsa import OracleDSA, OracleLoss
from tests.support import megatron_dsa, needs
from tests.support.dsa import (
    PARAMETERS,
    VARIANTS,
    absorbed_rows,
    by_sequence,
    config_of,
    random_weights,
)
from tests.support.layouts import Layout, dense, packed
from tests.support.numerics import relative_error

pytestmark = needs.no_gpu  # Megatron puts its rotary tables on a GPU
BOUND = 5e-6
LAYOUTS = {"sbhd": dense(13, 2), "thd": packed((5, 1, 11))}
# More heads than elsewhere: their scores are seldom all cut off by the ReLU, which makes ties.
CASES = {
    name: replace(VARIANTS[name], heads=16)
    for name in ("deepseek", "glm", "no_relu", "topk_above", "q_lora_none")
}


class HostLayerNorm(nn.LayerNorm):
    """torch's norm with the constructor of Megatron's."""

    def __init__(self, config, hidden_size: int, eps: float) -> None:
        assert config.normalization == "LayerNorm"
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


@pytest.fixture
def reported(monkeypatch) -> list[Tensor]:
    """The losses that Megatron logs."""
    found = []
    megatron_dsa.transform_on_a_cpu(monkeypatch)
    monkeypatch.setattr(
        megatron.DSAIndexerLossLoggingHelper,
        "save_loss_to_tracker",
        lambda loss, **_: found.append(loss),
    )
    return found


def build(dsa: OracleDSA, loss: OracleLoss, weights) -> megatron.DSAttention:
    """Megatron's core attention with the weights of the oracle."""
    config = config_of(
        dsa,
        torch.float32,
        calculate_per_token_loss=loss.per_token,
        dsa_indexer_loss_coeff=loss.coefficient,
        dsa_indexer_use_sparse_loss=loss.sparse,
    )
    linear = DuplicatedLinear
    indexer = megatron.DSAIndexerSubmodules(linear, linear, HostLayerNorm, linear)
    core = megatron.DSAttention(
        config,
        megatron.DSAttentionSubmodules(ModuleSpec(megatron.DSAIndexer, submodules=indexer)),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=dsa.mla.softmax_scale(),
        k_channels=dsa.mla.kv_lora_rank + dsa.mla.rope,
        v_channels=dsa.mla.kv_lora_rank,
    )
    with torch.no_grad():
        for name, its in PARAMETERS.items():
            core.indexer.get_parameter(its).copy_(weights[name])
    return core.train()


def attend(core, dsa: OracleDSA, weights, x: Tensor, layout: Layout, params) -> Tensor:
    """Output of Megatron's core attention over the rows ``x`` of a layout."""
    mla = dsa.mla
    table = mla.rotary_table(layout.tokens)

    def of_sequence(sequence):
        rows = x[sequence.rows]
        q_content, q_rope, kv = absorbed_rows(mla, weights, rows, table)
        latent = oracle_dsa.query_latent(mla, weights, rows)
        return torch.cat((q_content, q_rope), -1), kv[:, None], latent

    made = by_sequence(layout.sequences, len(x), of_sequence)
    query, key, latent = (t.view(layout.tokens, layout.batch, *t.shape[1:]).float() for t in made)
    if layout.lengths is not None:
        query, key = query.squeeze(1), key.squeeze(1)
    return core(
        query,
        key,
        None,
        None,
        x=x.view(layout.tokens, layout.batch, -1).float(),
        qr=latent,
        up_v_weight=weights["w_uv"].view(mla.heads, mla.v, -1).float(),
        attn_mask_type=AttnMaskType.causal,
        packed_seq_params=params,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense_loss", "sparse_loss"])
def test_megatron(case, layout, sparse, per_token, reported, monkeypatch):
    """Output, chosen keys, loss, and the indexer's gradients, which come from the loss alone."""
    dsa, layout = CASES[case], LAYOUTS[layout]
    loss = OracleLoss(coefficient=0.7, sparse=sparse, per_token=per_token)
    weights = random_weights(dsa)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    truth = oracle_dsa.evaluate(dsa, weights, x, torch.ones_like(x), layout.sequences, loss=loss)
    core = build(dsa, loss, weights)
    x, found = x.requires_grad_(), []
    scatter = megatron.dsa_masking.scatter_topk_into_index_mask
    monkeypatch.setattr(
        megatron.dsa_masking,
        "scatter_topk_into_index_mask",
        lambda mask, topk, **how: (found.append(topk), scatter(mask, topk, **how))[1],
    )
    output = attend(core, dsa, weights, x, layout, layout.packed_seq_params(torch.device("cpu")))
    output = output.double().view(len(x), -1) @ weights["w_o"].T
    output.sum().backward()

    assert relative_error(output, truth.output) < BOUND
    assert relative_error(reported[0], truth.loss) < BOUND
    assert relative_error(x.grad, truth.input_grad) < BOUND, "the loss must not reach the model"
    for name, its in PARAMETERS.items():
        grad = core.indexer.get_parameter(its).grad
        assert relative_error(grad, truth.weight_grads[name]) < BOUND, name
    _same_keys(found[0], truth, layout)


def _same_keys(topk: Tensor, truth: oracle_dsa.OracleDSAResult, layout: Layout) -> None:
    for b, (sequence, chosen) in enumerate(zip(layout.sequences, truth.chosen, strict=True)):
        first = 0 if layout.lengths is None else int(sequence.rows[0])
        entry = b if layout.lengths is None else 0
        for query, row in enumerate(chosen):
            keys = (row.nonzero().flatten() + first).tolist()
            assert sorted(s for s in topk[entry, first + query].tolist() if s >= 0) == keys


@pytest.mark.parametrize("told", [True, False])
def test_padding(told, reported):
    """Megatron's mean is over all rows of a padded pack, unless told which ones are tokens."""
    dsa, loss, layout = CASES["deepseek"], OracleLoss(), packed((5, 2, 4), (6, 2, 7))
    weights = random_weights(dsa)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    truth = oracle_dsa.forward(dsa, weights, x, layout.sequences, loss=loss)
    params = layout.packed_seq_params(torch.device("cpu"))
    if told:
        params.real_token_mask_q = torch.zeros(layout.tokens, dtype=torch.bool)
        for sequence in layout.sequences:
            params.real_token_mask_q[sequence.rows] = True
    attend(build(dsa, loss, weights), dsa, weights, x, packed(layout.slots), params)
    error = relative_error(reported[0], truth.loss)
    assert error < BOUND if told else error > 1e-2
