"""Loading, training and exporting through Megatron-Bridge, where it is installed (Python 3.12).

With one process, or tensor-parallel over several.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.serving.export import hf_weights
from tests.conversion.megatron_models import SAME
from tests.conversion.support import V2_LITE, random_tensors, tiny_config, write_hugging_face
from tests.distributed.whole import on_one_rank
from tests.support import needs, world
from tests.support.models import call, logits, token_batch

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

from tests.support.bridge import import_bridge

import_bridge()

import yaml  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from megatron.bridge.peft.lora import LoRA  # noqa: E402
from megatron.bridge.utils.instantiate_utils import instantiate  # noqa: E402
from megatron.bridge.utils.yaml_utils import safe_yaml_representers  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from absorbed_mla.bridge import absorbed_mla_layer_spec, mapping  # noqa: E402

# transformers before 5.23 does not scale V2's softmax by mscale; Bridge 0.6.2 wants <= 5.12.1.
MODELS = {"v3": {}, "v2_lite": {**V2_LITE, "rope_scaling": None}}
# What asks for a GPU, apex or TransformerEngine.
OFF = (
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "cross_entropy_loss_fusion",
)


def written(folder: Path, **changes) -> dict[str, Tensor]:
    """A tiny model in float32 as a Hugging Face folder; its tensors."""
    config = tiny_config(**{**SAME, **changes, "torch_dtype": "float32", "head_dim": 8})
    # Of a size that keeps logits near one.
    tensors = {k: v / 8 if v.ndim > 1 else v for k, v in random_tensors(config).items()}
    tensors = {k: v.float() for k, v in tensors.items()}
    on_one_rank(lambda: write_hugging_face(folder, config, tensors))
    return tensors


def provider_of(bridge: AutoBridge, **changes):
    """A provider of small local layers on this machine."""
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec = absorbed_mla_layer_spec
    for name in OFF:
        setattr(provider, name, False)
    provider.cross_entropy_fusion_impl = "native"
    provider.moe_token_dispatcher_type = "allgather"
    provider.moe_router_load_balancing_type = "none"
    provider.moe_aux_loss_coeff = 0.0
    provider.transformer_impl = "local"
    provider.use_cpu_initialization = True
    provider.make_vocab_size_divisible_by = 1
    provider.params_dtype, provider.bf16, provider.fp16 = torch.float32, False, False
    provider.tensor_model_parallel_size = world.tp_size()
    provider.sequence_parallel = world.tp_size() > 1
    for name, value in changes.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


def built(bridge: AutoBridge, **changes) -> GPTModel:
    """A model with the bridge's weights."""
    provider = provider_of(bridge, **changes)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = provider.provide(pre_process=True, post_process=True)
    bridge.load_hf_weights([model])
    return model


def exported(bridge: AutoBridge, model: GPTModel) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in bridge.export_hf_weights([model], show_progress=False)}


def write_exported(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Weights of a model that was loaded from ``before`` beside it, as ``after``."""
    fields = json.loads((folder / "before/config.json").read_text())
    write_hugging_face(folder / "after", tiny_config(**fields), tensors)


def difference(model: GPTModel, folder: Path) -> float:
    """Largest difference of logits to those of transformers, relative to the largest."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(token_batch()).logits
    found = logits(model.eval())
    return ((found - expected).abs().max() / expected.abs().max()).item()


def train(model: GPTModel, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    for _ in range(steps):
        call(model, labels=token_batch().roll(-1, 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_load_train_export(name, folder):
    """Bit by bit to the model and back; the logits are those of transformers, trained or not."""
    tensors = written(folder / "before", **MODELS[name])
    bridge = AutoBridge.from_hf_pretrained(folder / "before")
    model = built(bridge)
    layers = [layer.self_attention for layer in model.decoder.layers]
    assert all(isinstance(layer, AbsorbedMLASelfAttention) for layer in layers)
    found = exported(bridge, model)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert difference(model, folder / "before") < 1e-5
    own = dict(hf_weights(model))
    assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items())
    if world.size() > 1:
        # Sums of gradients over ranks are the business of Megatron's own loop.
        return
    train(model, 2)
    after = exported(bridge, model)
    assert not torch.equal(after[LAST_KV_UP], tensors[LAST_KV_UP])
    fields = json.loads((folder / "before/config.json").read_text())
    own = dict(hf_weights(model, hf_config=fields))
    assert set(own) == set(after)
    assert all(torch.equal(own[name], tensor) for name, tensor in after.items())
    write_exported(folder, after)
    assert difference(model, folder / "after") < 1e-5
    assert difference(model, folder / "before") > 1e-2


class TestLoRA:
    """Bridge's own adapters. Column-parallel down-projections are layers of a class it knows."""

    @pytest.fixture
    def adapted(self, folder):
        """A bridge, the model's tensors, and functions that build and that adapt it."""
        tensors = written(folder / "before")
        bridge = AutoBridge.from_hf_pretrained(folder / "before")
        options = AbsorbedMLAOptions(latent_norm_eps=1e-6, down_projection="column_parallel")
        spec = partial(absorbed_mla_layer_spec, options=options)

        def build(*targets: str) -> GPTModel:
            model = built(bridge, transformer_layer_spec=spec)
            return LoRA(target_modules=[*targets], dim=4, alpha=8)(model, training=True)

        return bridge, tensors, build

    @needs.processes(1)
    def test_train_save_merge(self, adapted, folder):
        """Every layer but the two up-projections; merged on export, where nothing else changed."""
        bridge, tensors, build = adapted
        layers = ("q_down", "q_up", "kv_down")
        targets = [*(f"linear_{layer}_proj" for layer in layers), "linear_proj", "linear_fc1"]
        model = build(*targets)
        trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        assert all(".adapter." in name for name in trainable)
        assert {name.split(".adapter.")[0].split(".")[-1] for name in trainable} == {*targets}
        train(model, 2)
        after = exported(bridge, model)
        changed = {name for name in after if not torch.equal(after[name], tensors[name])}
        assert changed and not [name for name in changed if "kv_b_proj" in name or "norm" in name]
        assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj"} <= {
            name.split(".")[-2] for name in changed
        }
        write_exported(folder, after)
        assert difference(model, folder / "after") < 1e-5
        saved = {k: v for k, v in model.sharded_state_dict().items() if ".adapter." in k}
        (folder / "adapters").mkdir()
        dist_checkpointing.save(saved, str(folder / "adapters"))
        again = build(*targets)
        asked = {k: v for k, v in again.sharded_state_dict().items() if ".adapter." in k}
        again.load_state_dict(dist_checkpointing.load(asked, str(folder / "adapters")), False)
        assert torch.equal(logits(again.eval()), logits(model))

    def test_refused(self, adapted):
        """By Bridge, which names the class: their weights are handed out, not multiplied."""
        with pytest.raises(NotImplementedError, match="HeadwiseUpProjection"):
            adapted[-1]("linear_k_up_proj")


@pytest.mark.parametrize("down_projection", ["duplicated", "column_parallel"])
def test_fused_down_projections(down_projection, folder):
    """mla_down_proj_fusion, which Bridge's own mappings do not know."""
    tensors = written(folder / "model")
    bridge = AutoBridge.from_hf_pretrained(folder / "model")
    options = AbsorbedMLAOptions(latent_norm_eps=1e-6, down_projection=down_projection)
    spec = partial(absorbed_mla_layer_spec, options=options)
    model = built(bridge, mla_down_proj_fusion=True, transformer_layer_spec=spec)
    assert hasattr(model.decoder.layers[0].self_attention, "linear_qkv_down_proj")
    found = exported(bridge, model)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert difference(model, folder / "model") < 1e-5


LAST_KV_UP = "model.layers.2.self_attn.kv_b_proj.weight"


def test_run_config_keeps_the_spec():
    """In the YAML that Bridge writes beside its checkpoints, which NeMo-RL builds models from."""
    with safe_yaml_representers():
        text = yaml.safe_dump({"transformer_layer_spec": absorbed_mla_layer_spec})
    read = instantiate(yaml.safe_load(text))
    assert read["transformer_layer_spec"] is absorbed_mla_layer_spec


def test_everywhere(folder):
    """A program that makes the provider itself gets our attention."""
    written(folder / "model")
    before = AutoBridge.from_hf_pretrained(folder / "model").to_megatron_provider(False)
    assert before.transformer_layer_spec is not absorbed_mla_layer_spec
    try:
        importlib.import_module("absorbed_mla.bridge.everywhere")
        after = AutoBridge.from_hf_pretrained(folder / "model").to_megatron_provider(False)
        assert after.transformer_layer_spec is absorbed_mla_layer_spec
    finally:
        for bridge in mapping.BRIDGES:
            mapping.register(bridge, bridge)
