"""Options of sparse attention: what Megatron's config gets, and which contradictions are refused.

If these fail, a model trains dense where its user believes it to be sparse, or an indexer does not
learn.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tests.support.train_arguments import checked, resolved_from, saved, start_of
from training.arguments import model_of
from training.checkpoint import Start
from training.checkpoint_args import model_from_args
from training.checkpoint_model import require_same_model, require_same_run
from training.model import model_config

INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 16"
DSA = f"--experimental-attention-variant dsa {INDEXER}"


def config_of(line: str) -> MLATransformerConfig:
    return model_config(checked(line)).transformer


class TestConfig:
    def test_a_preset(self):
        config = config_of("--preset deepseek-v3.2")
        assert config.experimental_attention_variant == "dsa"
        assert (config.dsa_indexer_n_heads, config.dsa_indexer_topk) == (64, 2048)
        assert (config.dsa_indexer_loss_coeff, config.dsa_indexer_use_sparse_loss) == (1.0, True)
        line = "--preset deepseek-v3.2 --experimental-attention-variant none"
        assert config_of(line).experimental_attention_variant is None
        assert model_of(checked(line)) == model_of(checked("--preset deepseek-v3"))

    @pytest.mark.parametrize(
        ("option", "field", "value"),
        [
            ("--dsa-indexer-n-heads 8", "n_heads", 8),
            ("--dsa-indexer-head-dim 64", "head_dim", 64),
            ("--dsa-indexer-topk 7", "topk", 7),
            ("--dsa-indexer-topk-freq 3", "topk_freq", 3),
            ("--dsa-indexer-skip-topk-offset 2", "skip_topk_offset", 2),
            ("--dsa-indexer-k-norm-epsilon 1e-3", "k_norm_epsilon", 1e-3),
            ("--dsa-indexer-rope-interleaved", "rope_interleaved", True),
            ("--no-dsa-indexer-rotate-activation", "rotate_activation", False),
            ("--no-dsa-indexer-scoring-relu", "scoring_relu", False),
            ("--dsa-indexer-loss-coeff 0.25", "loss_coeff", 0.25),
            ("--dsa-indexer-loss-coeff 0", "loss_coeff", 0.0),
            ("--no-dsa-indexer-use-sparse-loss", "use_sparse_loss", False),
        ],
        ids=lambda x: x.split()[0] if isinstance(x, str) and x.startswith("--") else "",
    )
    def test_an_option(self, option, field, value):
        usual, config = config_of(DSA), config_of(f"{DSA} {option}")
        assert getattr(usual, f"dsa_indexer_{field}") != value
        assert getattr(config, f"dsa_indexer_{field}") == value

    @pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
    @pytest.mark.parametrize("factor", [2, 8, 32])
    def test_a_scaled_model_has_a_choice(self, name, factor):
        """Also with the default sequence length."""
        line = f"--preset {name} --scale-down {factor}"
        assert config_of(line).dsa_indexer_topk == 32
        assert config_of(f"{line} --seq-length 100000").dsa_indexer_topk == 2048 // factor
        assert config_of(f"{line} --dsa-indexer-topk 50").dsa_indexer_topk == 50

    def test_the_warm_up(self):
        """Dense attention and its loss; the model keeps its top-k for what follows."""
        line = f"{DSA} --train-only indexer --seq-length 128"
        config = config_of(line)
        assert config.dsa_indexer_topk == 128
        assert config.dsa_indexer_use_sparse_loss is False
        assert checked(line).dsa_indexer_topk == 16


def compare(start: Start, line: str) -> None:
    require_same_model(checked(line), start, "train.py")


class TestCheckpoint:
    """A dense checkpoint becomes sparse where its user says so, and not otherwise."""

    def test_silently(self):
        with pytest.raises(ValueError) as error:
            compare(start_of(""), DSA)
        text = str(error.value)
        assert "--experimental-attention-variant none in the checkpoint, dsa requested" in text
        assert text.endswith("--new-indexer gives a dense model an indexer with initial weights")

    def test_explicitly(self, capsys):
        compare(start_of(""), f"--load there --new-indexer {INDEXER}")
        assert capsys.readouterr().err == ""

    def test_other_sizes_are_refused_all_the_same(self):
        with pytest.raises(ValueError, match="--hidden-size 128 in the checkpoint, 64 requested"):
            compare(start_of(""), f"--load there --new-indexer {INDEXER} --hidden-size 64")

    def test_an_indexer_is_not_replaced(self):
        with pytest.raises(ValueError, match="variant dsa in the checkpoint, none requested"):
            compare(start_of(DSA), f"--load there --new-indexer {INDEXER}")

    def test_of_a_checkpoint_that_describes_its_model(self, monkeypatch):
        def resolve(there: str, more: str):
            return model_of(resolved_from(saved(there), monkeypatch, more))

        sparse = resolve("", f"--new-indexer {INDEXER}")
        assert (sparse["experimental_attention_variant"], sparse["dsa_indexer_topk"]) == ("dsa", 16)
        assert resolve("", "")["experimental_attention_variant"] is None
        with pytest.raises(ValueError, match="in --load there has an indexer; leave the option"):
            resolve(DSA, f"--new-indexer {INDEXER}")

    def test_the_warm_up_saves_the_models_own_top_k(self):
        there = saved(f"{DSA} --train-only indexer")
        assert model_from_args(there)["dsa_indexer_topk"] == 16

    def test_another_stage_is_another_run(self):
        """The optimizer's state is of other parameters."""
        there = Start(Path("there"), saved(f"{DSA} --train-only indexer"), 5)
        require_same_run(there, saved(f"{DSA} --train-only indexer"))
        with pytest.raises(ValueError, match=r"--train-only indexer there, None here. To resume"):
            require_same_run(there, saved(DSA))
