"""The settings of sparse attention, and which layer selects for which."""

import pytest
from megatron.core.transformer.experimental_attention_variant.dsa import (
    is_dsa_skip_topk_layer,
    source_dsa_compute_layer,
)

from absorbed_mla.dsa.config import DSAConfig
from tests.support.dsa import TINY_DSA, config_of


def settings(**changes) -> DSAConfig:
    return DSAConfig.from_config(config_of(TINY_DSA, **changes))


class TestFields:
    def test_names(self):
        found = settings(
            dsa_indexer_loss_coeff=0.25,
            dsa_indexer_use_sparse_loss=True,
            calculate_per_token_loss=True,
            dsa_indexer_topk_freq=4,
            dsa_indexer_skip_topk_offset=3,
            dsa_indexer_k_norm_epsilon=1e-4,
            dsa_indexer_rope_interleaved=True,
            dsa_indexer_rotate_activation=False,
            dsa_indexer_scoring_relu=False,
        )
        assert found == DSAConfig(
            num_heads=3,
            head_dim=16,
            topk=2,
            rope_interleaved=True,
            rotate_activation=False,
            scoring_relu=False,
            k_norm_eps=1e-4,
            loss_coefficient=0.25,
            sparse_loss=True,
            per_token_loss=True,
            topk_freq=4,
            skip_topk_offset=3,
        )

    def test_defaults(self):
        found = settings(dsa_indexer_k_norm_epsilon=None, layernorm_epsilon=1e-3)
        assert found.k_norm_eps == 1e-3, "Megatron's indexer takes the model's epsilon"
        assert found.loss_coefficient == 0.0

    @pytest.mark.parametrize(
        ("field", "value", "accepted"),
        [
            ("n_heads", None, "integer of at least 1"),
            ("n_heads", 0, "integer of at least 1"),
            ("topk", True, "integer of at least 1"),
            ("head_dim", 7, "at least qk_pos_emb_head_dim=8"),
            ("head_dim", 24, "power of two"),
            ("rope_interleaved", "yes", "True or False"),
            ("k_norm_epsilon", 0, "between 0 and 1"),
            ("loss_coeff", float("nan"), "at least 0"),
            ("loss_coeff", -1.0, "at least 0"),
        ],
    )
    def test_refused(self, field, value, accepted):
        with pytest.raises(ValueError, match=f"dsa_indexer_{field}") as refusal:
            settings(**{f"dsa_indexer_{field}": value})
        assert accepted in str(refusal.value) and repr(value) in str(refusal.value)

    def test_a_width_for_rotate_activation_only(self):
        found = settings(dsa_indexer_head_dim=24, dsa_indexer_rotate_activation=False)
        assert found.head_dim == 24


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("freq", range(1, 5))
def test_sharing_is_megatrons(freq, offset):
    found = settings(dsa_indexer_topk_freq=freq, dsa_indexer_skip_topk_offset=offset)
    for layer in range(1, 13):
        assert found.source_layer(layer) == source_dsa_compute_layer(layer, offset, freq)
        assert found.shares_selection(layer) == is_dsa_skip_topk_layer(layer, offset, freq)
