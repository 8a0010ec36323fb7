"""The oracle of sparse attention against transformers' DeepSeek-V3.2 and GLM-5.

What transformers does differently, none of which changes the function:

- It evaluates RMSNorm, the rotary table and the indexer's scores in float32 at any dtype, hence the
  bound of 1e-6 here. LayerNorm of the indexer's keys has epsilon 1e-6, whatever ``rms_norm_eps``;
  the latent norms have 1e-6 as well.
- The products are multiplied by Di^-1/2 before the ReLU, the head weights by Hi^-1/2.
- There is no Hadamard transform: it is orthogonal and leaves the products as they are.
- Both models apply the ReLU. Rotated channels come first; they are half-split in DeepSeek-V3.2's
  indexer and interleaved in GLM-5's, the main attention is interleaved in both.
- ``weights_proj`` stays in float32 where the model is loaded in half precision
  (``_keep_in_fp32_modules``), and the hidden states are converted to it.
- Ties are broken as ``torch.topk`` does, in no documented order. They are not rare: a key whose
  products are negative in all heads scores 0, likely with a few heads. Hence 16 heads here.
- ``indexer_types`` "shared" layers take the selection of the layer before, which passes it on.
"""

from dataclasses import replace

import pytest
import torch

from tests import oracle, oracle_dsa
from tests.oracle_dsa import OracleDSA
from tests.support.dsa import random_weights
from tests.support.numerics import relative_error
from tests.support.transformers_dsa import DEEPSEEK, GLM, VOCABULARY, model_of

BOUND = 1e-6
TOKENS, BATCH = 23, 2
NAMES = {
    "w_dq": "q_a_proj.weight",
    "q_norm": "q_a_layernorm.weight",
    "w_uq": "q_b_proj.weight",
    "w_dkv": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "w_o": "o_proj.weight",
    "i_wq": "indexer.wq_b.weight",
    "i_wk": "indexer.wk.weight",
    "i_k_gain": "indexer.k_norm.weight",
    "i_k_bias": "indexer.k_norm.bias",
    "i_w": "indexer.weights_proj.weight",
}


def load(dsa: OracleDSA, attention, weights) -> None:
    """Copy the oracle's weights into a layer of transformers."""
    mla = dsa.mla
    found = dict(attention.named_parameters())
    per_head = zip(weights["w_uk"].split(mla.nope), weights["w_uv"].split(mla.v), strict=True)
    kv_up = torch.cat([part for pair in per_head for part in pair])
    named = {hf: weights[name] for name, hf in NAMES.items() if hf in found}
    named["kv_b_proj.weight"] = kv_up
    assert named.keys() == found.keys()
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(named[name])


@pytest.mark.parametrize(("dsa", "glm"), [(DEEPSEEK, False), (GLM, True)], ids=["v3.2", "glm-5"])
class TestTransformers:
    def test_layer(self, dsa, glm):
        """Output and the set of chosen keys, where a layer selects."""
        model = model_of(dsa, glm)
        layer = model.model.layers[0].self_attn
        weights = random_weights(dsa)
        load(dsa, layer, weights)
        x = torch.randn(TOKENS, BATCH, dsa.mla.hidden, dtype=torch.float64)
        truth = oracle_dsa.forward(dsa, weights, x.flatten(0, 1), oracle.batch(TOKENS, BATCH))
        selected = []
        layer.indexer.register_forward_hook(lambda module, args, found: selected.append(found))
        hidden = x.transpose(0, 1)
        positions = torch.arange(TOKENS)[None]
        mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)
        with torch.no_grad():
            output, *_ = layer(
                hidden,
                model.model.rotary_emb(hidden, positions),
                mask.expand(BATCH, 1, TOKENS, TOKENS),
                position_ids=positions,
            )
        expected = truth.output.view(TOKENS, BATCH, -1).transpose(0, 1)
        assert relative_error(output, expected) < BOUND
        for b in range(BATCH):
            for query in range(dsa.topk, TOKENS):
                keys = truth.chosen[b][query].nonzero().flatten().tolist()
                assert sorted(selected[0][b, query].tolist()) == keys
                assert len(keys) == dsa.topk

    def test_logits(self, dsa, glm):
        """Whole models: the oracle in the place of every attention gives the same logits.

        The third layer of the GLM shares the second one's selection, which is not the first one's.
        """
        types = {"indexer_types": ["full", "full", "shared", "full"]} if glm else {}
        model = model_of(dsa, glm, num_hidden_layers=4, **types)
        layers = [layer.self_attn for layer in model.model.layers]
        weights = [random_weights(dsa, seed) for seed in range(4)]
        for layer, its in zip(layers, weights, strict=True):
            load(dsa, layer, its)
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))
        with torch.no_grad():
            expected = model(tokens).logits
            last = None
            for layer, its in zip(layers, weights, strict=True):
                shares = getattr(layer, "skip_topk", False)

                def run(hidden_states, its=its, shares=shares, **_):
                    nonlocal last
                    rows = hidden_states.transpose(0, 1).flatten(0, 1)
                    last = oracle_dsa.forward(
                        dsa,
                        its,
                        rows,
                        oracle.batch(TOKENS, BATCH),
                        chosen=last.chosen if shares else None,
                    )
                    out = last.output.view(TOKENS, BATCH, -1).transpose(0, 1)
                    return (out, None, torch.empty(0)) if glm else (out, None)

                layer.forward = run
            actual = model(tokens).logits
        assert relative_error(actual, expected) < BOUND

    def test_what_would_be_seen(self, dsa, glm):
        """Every choice of the oracle changes the layer by far more than the bound."""
        weights = random_weights(dsa)
        x = torch.randn(TOKENS * BATCH, dsa.mla.hidden, dtype=torch.float64)
        sequences = oracle.batch(TOKENS, BATCH)
        right = oracle_dsa.forward(dsa, weights, x, sequences).output
        for change in (
            {"interleaved": not dsa.interleaved},
            {"relu": False},
            {"topk": dsa.topk + 1},
        ):
            wrong = oracle_dsa.forward(replace(dsa, **change), weights, x, sequences).output
            assert relative_error(wrong, right) > 1e-2
        turned = oracle_dsa.forward(replace(dsa, hadamard=True), weights, x, sequences).output
        assert relative_error(turned, right) < 1e-12
