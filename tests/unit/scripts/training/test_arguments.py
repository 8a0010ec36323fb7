"""Models of scripts/train.py: presets, their scaling, single sizes, and the vocabulary."""

import pytest

from absorbed_mla.dims import MLADims, softmax_scale
from absorbed_mla.dsa.config import DSAConfig
from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from tests.support.train_arguments import checked, resolved, resolved_from, saved
from training import arguments, options
from training.arguments import model_of, parse_arguments, set_vocabulary
from training.model import model_config
from training.options import flag_of, own_parser
from training.presets import COMMON, PRESETS, get_preset, scale_down
from training.refusals import require_known

_SCALES = {
    "deepseek-v2-lite": 0.1147214,
    "deepseek-v3": 0.1352338,
    "deepseek-v3.2": 0.1352338,
    "glm-5": 0.0625,
    "kimi-k2": 0.1308608,
    "moonlight": 0.0721688,
}
CP2 = "--context-parallel-size 2"
INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 16"
DSA = f"--experimental-attention-variant dsa {INDEXER}"
SPARSE = "--preset deepseek-v3.2 --scale-down 16 --num-layers 3"
STAGES = f"{CP2} --num-layers 2 --pipeline-model-parallel-size 2 --packed --num-experts 0"


def config_of(line: str, processes: int = 1):
    return model_config(checked(line, processes)).transformer


@pytest.mark.parametrize("name", _SCALES)
def test_released_models(name):
    preset, config = get_preset(name), config_of(f"--preset {name}")
    scale = softmax_scale(config, MLADims.from_config(config, 1))
    assert scale == pytest.approx(_SCALES[name], rel=1e-6)
    heads = (192, 256) if name == "glm-5" else (128, 128)
    names = ("kv_lora_rank", "qk_head_dim", "v_head_dim", "qk_pos_emb_head_dim")
    assert tuple(preset[name] for name in names) == (512, *heads, 64)
    assert preset["latent_norm_epsilon"] == 1e-6
    assert len(preset["moe_layer_freq"]) == preset["num_layers"]
    assert preset.keys() == COMMON.keys()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("factor", [1, 2, 3, 8, 16, 64, 1000])
def test_scaled_models_stay_valid(name, factor):
    preset = get_preset(name)
    small = scale_down(preset, factor)
    assert factor > 1 or small == preset
    assert len(small["moe_layer_freq"]) == small["num_layers"]
    assert set(small["moe_layer_freq"]) == {0, 1}
    assert small["num_attention_heads"] % 4 == 0
    assert small["qk_pos_emb_head_dim"] % 2 == 0
    assert 1 <= small["moe_router_topk"] <= small["num_experts"]
    assert (small["q_lora_rank"] is None) == (preset["q_lora_rank"] is None)
    assert small["hidden_size"] <= preset["hidden_size"]
    variant = preset["experimental_attention_variant"]
    config = config_of(f"--preset {name} --scale-down {factor}")
    assert config.experimental_attention_variant == variant
    if variant:
        dsa = DSAConfig.from_config(config)
        assert 4 <= dsa.num_heads <= preset["dsa_indexer_n_heads"]
        assert 16 <= dsa.topk <= preset["dsa_indexer_topk"]
        assert dsa.head_dim > small["qk_pos_emb_head_dim"]


def test_sizes_override_the_preset():
    model = model_of(resolved("--num-layers 4 --hidden-size 64 --q-lora-rank 0"))
    assert (model["num_layers"], model["hidden_size"], model["q_lora_rank"]) == (4, 64, None)
    assert model["moe_layer_freq"] == [0, 0, 1, 1]


def test_no_experts_make_a_dense_model():
    model = model_of(resolved("--num-experts 0"))
    assert (model["num_experts"], model["moe_layer_freq"]) == (None, 1)
    code = "--num-experts 0 --moe-layer-freq __import__('os')"
    assert model_of(resolved("--moe-layer-freq [0,0,0]")) == model_of(resolved(code)) == model
    assert config_of("--num-experts 0").num_moe_experts is None


@pytest.mark.parametrize(
    ("line", "processes", "cp_comm_type", "varies"),
    [
        (CP2, 2, "all_gather", False),
        (f"{CP2} --cp-comm-type p2p --packed", 2, "p2p", False),
        (f"{STAGES} --cp-comm-type p2p all_gather", 4, ["p2p", "all_gather"], True),
        ("--pipeline-model-parallel-size 3 --packed", 3, "all_gather", False),
        (f"{CP2} --cp-comm-type auto", 2, "auto", False),
        (f"{CP2} --cp-comm-type auto p2p auto", 2, ["auto", "p2p", "auto"], False),
        # Megatron's config accepts all of them, but not "auto" with sparse attention.
        (f"{SPARSE} {CP2} --cp-comm-type auto", 2, "all_gather", False),
    ],
)
def test_megatron_is_told_of_context_parallelism(line, processes, cp_comm_type, varies):
    config = config_of(line, processes)
    assert config.context_parallel_size == (2 if "context" in line else 1)
    assert config.cp_comm_type == cp_comm_type
    assert config.variable_seq_lengths == varies


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("1", 3, (1, 1, 1)),
        ("2", 4, (1, 0, 1, 0)),
        ("([0]*1+[1]*2)", 3, (0, 1, 1)),
        ("2*[0]+[1]", 3, (0, 0, 1)),
        ("[0, 1]*2", 4, (0, 1, 0, 1)),
    ],
)
def test_patterns_of_experts(text, layers, expected):
    assert moe_layers(parse_moe_layer_freq(text), layers) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", 320),
        ("--preset deepseek-v3", 129280),
        ("--preset deepseek-v3 --scale-down 8", 320),
        ("--make-vocab-size-divisible-by 300", 300),
        ("--vocab-size 400", 448),
    ],
)
def test_rows_of_the_vocabulary(line, expected):
    assert checked(line, tokens=257).padded_vocab_size == expected


def test_a_vocabulary_smaller_than_the_tokenizers(monkeypatch):
    with pytest.raises(ValueError, match="at least the tokenizer's 257, got 100"):
        checked("--vocab-size 100")
    args = resolved_from(saved(padded_vocab_size=999), monkeypatch)
    with pytest.raises(ValueError, match="at least the tokenizer's 1000, got 999"):
        set_vocabulary(args, 1000)
    set_vocabulary(args, 257)
    assert args.padded_vocab_size == 999


def test_every_option_of_megatrons_is_known_without_importing_it():
    actions = arguments._megatron_parser()._actions
    flags = {flag for action in actions for flag in action.option_strings}
    require_known((flag for flag in flags if flag.startswith("--")), own_parser())
    # And every size of a model has one but these.
    assert COMMON.keys() - {action.dest for action in actions} == {
        *("original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("moe_router_group_score_topk", "moe_router_norm_topk_prob", "llama_4_scaling_beta"),
        "post_mlp_layernorm",
    }


def test_defaults_of_ours_are_shown():
    text = options.own_parser().format_help()
    for name, value in options.DEFAULTS.items():
        shown = " ".join(value) if isinstance(value, list) else value
        assert f"{flag_of(name)} {shown}" in text
        assert getattr(parse_arguments([]), name) == value


class TestSparseAttention:
    """If these fail, a model trains dense where its user believes it to be sparse."""

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
