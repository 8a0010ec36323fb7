"""The table against real Megatron models, and what happens to tensors that do not fit."""

import time

import pytest
import torch
from torch import Tensor

from checkpoint_conversion.errors import KnownNames
from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.layouts import (
    MegatronLayout,
    canonical_tensors,
    laid_out_tensors,
    tensor_parallel_rule,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import (
    hugging_face_shapes,
    megatron_shapes,
    to_hugging_face,
    to_megatron,
)
from checkpoint_conversion.mapping_table import GATED_ROWS, REPLICATED
from tests.conversion.legacy_support import shards
from tests.conversion.megatron_models import SAME, mapped_weights, megatron_model
from tests.conversion.support import (
    CONFIGS,
    NO_FUSED_DOWN,
    assert_same_tensors,
    in_memory,
    lazy,
    load_all,
    random_tensors,
    refused,
    tiny_config,
)

LAYOUTS = [
    MegatronLayout(norms=norms, kv_up=kv_up, down=down)
    for norms in ("separate", "fused")
    for kv_up in ("combined", "split")
    for down in ("separate", "fused")
]


CONFIGS_AND_LAYOUTS = [
    pytest.param(name, layout, id=f"{name}-{layout}")
    for name in CONFIGS
    for layout in LAYOUTS
    if layout.down != "fused" or name not in NO_FUSED_DOWN
]


@pytest.fixture(params=CONFIGS)
def config(request):
    return tiny_config(**CONFIGS[request.param])


class TestRoundTrip:
    @pytest.mark.parametrize(("config", "layout"), CONFIGS_AND_LAYOUTS, indirect=["config"])
    def test_bit_by_bit(self, config, layout):
        tensors = random_tensors(config)
        stored = laid_out_tensors(to_megatron(in_memory(tensors), config), layout, config)
        on_disk = in_memory(load_all(stored))
        assert MegatronLayout.recognise(on_disk) == layout
        back = to_hugging_face(canonical_tensors(on_disk, config), config)
        assert_same_tensors(load_all(back), tensors)

    def test_every_tensor_is_used(self, config):
        """A plan can prove from the leaves that it forgets nothing."""
        tensors = random_tensors(config)
        converted = to_megatron(in_memory(tensors), config)
        used = frozenset().union(*(tensor.leaves for tensor in converted.values()))
        assert used == set(tensors)

    def test_shapes_are_known_before_anything_is_read(self, config):
        def unreadable(session: ReadSession) -> Tensor:
            raise AssertionError("read while planning")

        tensors = {
            name: LazyTensor(shape, torch.bfloat16, unreadable, frozenset({name}), 0)
            for name, shape in hugging_face_shapes(config).items()
        }
        planned = to_megatron(tensors, config)
        assert {name: t.shape for name, t in planned.items()} == megatron_shapes(config)


def test_k_and_v_rows_of_each_head():
    """Said without the code's own functions; test_megatron_checkpoints.py does of other rows."""
    config = tiny_config()
    tensors = random_tensors(config)
    whole = to_megatron(in_memory(tensors), config)
    stored = load_all(laid_out_tensors(whole, MegatronLayout(kv_up="split"), config))
    combined = tensors["model.layers.2.self_attn.kv_b_proj.weight"]
    k = stored["decoder.layers.2.self_attention.linear_k_up_proj.weight"]
    v = stored["decoder.layers.2.self_attention.linear_v_up_proj.weight"]
    for head in range(4):
        rows = combined[head * 32 : (head + 1) * 32]
        assert torch.equal(k[head * 12 : (head + 1) * 12], rows[:12])
        assert torch.equal(v[head * 20 : (head + 1) * 20], rows[12:])


class TestAgainstMegatron:
    """Names, shapes and partition dims of a GPTModel that Megatron builds itself."""

    CONFIG = tiny_config(**SAME, num_nextn_predict_layers=1)

    @pytest.fixture(scope="class")
    @staticmethod
    def model():
        return megatron_model(TestAgainstMegatron.CONFIG)

    def test_names_and_shapes(self, model):
        real = {name: tuple(t.shape) for name, t in mapped_weights(model).items()}
        assert real == megatron_shapes(self.CONFIG)

    @pytest.mark.parametrize(
        "changes",
        [
            # Experts in the first and third layer; the last is dense, and so is MTP's.
            {"num_hidden_layers": 4, "first_k_dense_replace": 0, "moe_layer_freq": 2},
            {"num_hidden_layers": 3, "first_k_dense_replace": 0, "moe_layer_freq": 2},
            {"tie_word_embeddings": True},
        ],
        ids=["dense MTP layer", "MTP layer of experts", "tied"],
    )
    def test_mtp_layers(self, changes):
        """Of the kind of the decoder's last layer; every weight comes back under its names."""
        config = tiny_config(**SAME, **changes, num_nextn_predict_layers=1)
        weights = mapped_weights(megatron_model(config))
        assert {name: tuple(t.shape) for name, t in weights.items()} == megatron_shapes(config)
        theirs = to_hugging_face(in_memory(weights), config)
        layer = f"model.layers.{config.num_layers}."
        experts = any(name.startswith(f"{layer}mlp.experts.") for name in theirs)
        assert experts == config.moe_layers[-1]
        values = load_all(theirs)
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        assert ("lm_head.weight" in values) != config.tied_embeddings
        assert torch.equal(values[f"{layer}shared_head.head.weight"], values[head])
        assert torch.equal(
            values[f"{layer}embed_tokens.weight"], values["model.embed_tokens.weight"]
        )
        assert_same_tensors(load_all(to_megatron(theirs, config)), weights)

    def test_partition_dims(self, model):
        for name, parameter in model.named_parameters():
            rule = tensor_parallel_rule(as_mapped(name))
            if "_down_proj" in name:
                continue  # local layers cut them, TransformerEngine's do not
            if not getattr(parameter, "tensor_model_parallel", False):
                assert rule is REPLICATED, name
            else:
                assert rule.dim == parameter.partition_dim, name
                assert (rule is GATED_ROWS) == ("linear_fc1" in name), name


class TestRefusals:
    def test_everything_at_once_with_the_nearest_name(self):
        config = tiny_config()
        tensors = random_tensors(config)
        tensors["model.layers.0.self_attn.kv_b_proj.weight"] = torch.zeros(3, 4)
        attention = "model.layers.1.self_attn."
        tensors[f"{attention}o_prj.weight"] = tensors.pop(f"{attention}o_proj.weight")
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
        with refused(
            "model.layers.1.self_attn.o_proj.weight is missing; expected shape (32, 80)",
            "nearest known name is model.layers.1.self_attn.o_proj.weight",
            "kv_b_proj.weight has shape (3, 4); expected (128, 24)",
            "model.norm.weight is torch.int8",
            problems=4,
        ):
            to_megatron(in_memory(tensors), config)

    def test_gate_and_up_of_two_dtypes(self):
        config = tiny_config()
        tensors = random_tensors(config)
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].float()
        with refused("must be of one dtype"):
            to_megatron(in_memory(tensors), config)

    def test_mtp_copy_that_is_none(self):
        """Megatron has one embedding; two different ones must not become one in silence."""
        config = tiny_config(**CONFIGS["mtp"])
        tensors = random_tensors(config)
        tensors["model.layers.3.embed_tokens.weight"][5, 5] += 1
        planned = to_megatron(in_memory(tensors), config)
        with refused("--exclude-mtp"):
            load_all(planned)

    @pytest.mark.parametrize(
        ("fused", "shape"),
        [
            ("linear_q_up_proj.layer_norm_weight", (16,)),
            ("linear_k_up_proj.weight", (128, 24)),
            ("linear_qkv_down_proj.weight", (48, 32)),
        ],
    )
    def test_one_weight_in_two_layouts(self, fused, shape):
        config = tiny_config()
        twice = load_all(to_megatron(in_memory(random_tensors(config)), config))
        twice[f"decoder.layers.0.self_attention.{fused}"] = torch.zeros(shape)
        with refused("stored twice"):
            canonical_tensors(in_memory(twice), config)

    def test_fused_down_projection_needs_both(self):
        config = tiny_config(**CONFIGS["v2_lite"])
        with refused("q_lora_rank"):
            laid_out_tensors({}, MegatronLayout(down="fused"), config)


class TestTensorParallel:
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_shards_make_the_whole_again(self, config, size):
        megatron = to_megatron(in_memory(random_tensors(config)), config)
        for name, tensor in megatron.items():
            rule = tensor_parallel_rule(name)
            (value,) = load_all({name: tensor}).values()
            own = shards(name, value, config, size)
            merged = rule.merge([lazy(f"{name} of rank {i}", t) for i, t in enumerate(own)])
            assert_same_tensors(load_all({name: merged}), {name: value})

    def test_a_gated_shard_has_both_halves(self):
        own = [torch.tensor([[0.0], [1], [4], [5]]), torch.tensor([[2.0], [3], [6], [7]])]
        merged = GATED_ROWS.merge([lazy("first", own[0]), lazy("second", own[1])])
        # gate 0..3, up 4..7
        assert load_all({"x": merged})["x"].flatten().tolist() == list(range(8))
        with refused("3 rows, which cannot be divided"):
            GATED_ROWS.merge([lazy("x", torch.ones(3, 1))])

    def test_copies_that_differ(self):
        copies = [lazy("a", torch.ones(4, 4)), lazy("b", torch.ones(4, 4))]
        assert torch.equal(load_all({"x": REPLICATED.merge(copies)})["x"], torch.ones(4, 4))
        copies[1] = lazy("b", torch.ones(4, 4).index_put((torch.tensor(3),), torch.tensor(1.5)))
        with refused("largest difference 0.5"):
            load_all({"x": REPLICATED.merge(copies)})

    def test_unknown_names_have_no_rule(self):
        assert tensor_parallel_rule("decoder.layers.0.self_attention.linear_z.weight") is None


class TestNearestName:
    """Which known name a wrong one was meant to be."""

    NAMES = tuple(
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(30)
        for expert in range(64)
        for part in ("gate", "up", "down")
    )

    @pytest.mark.parametrize(
        ("wrong", "near"),
        [
            (NAMES[0].replace("gate", "gat"), NAMES[0]),
            ("model.layers.7.mlp.experts.11.up_prj.weight", NAMES[3 * (7 * 64 + 11) + 1]),
            # Numbers that no name has.
            ("model.layers.99.mlp.experts.0.up_proj.weight", NAMES[1]),
            ("qwertz", None),
        ],
    )
    def test_nearest(self, wrong, near):
        assert KnownNames(self.NAMES).nearest(wrong) == near
        assert KnownNames(["a.{x}.weight"]).nearest("a.{x}.weigth") == "a.{x}.weight"

    def test_a_whole_model_of_wrong_names_takes_no_time(self):
        """A wrong config makes every name of a large checkpoint unknown."""
        known, start = KnownNames(self.NAMES), time.process_time()
        for name in self.NAMES:
            assert known.nearest(name.replace("experts", "expertz")) == name
        assert time.process_time() - start < 5
