"""Pipeline stages built by Megatron's own builders, with our specs, and trained for a step.

One of them has multi-token prediction (MTP) and no decoder layer.
"""

import re
import typing

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.checkpoint.distributed import load_model_weights, save_model_weights
from absorbed_mla.checkpoint.hybrid_names import to_hybrid_name
from specs.absorbed_mla_hybrid_specs import get_absorbed_mla_hybrid_stack_spec
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.models import BATCH, TOKENS, VOCAB, call, gpt_model, token_batch
from tests.support.numerics import relative_error

pytestmark = needs.processes(2)

OPTIONS = AbsorbedMLAOptions(latent_norm_eps=1e-3)
SIZES = {
    "vocab_size": VOCAB,
    "seq_length": TOKENS,
    "position_embedding_type": "rope",
    # Megatron's model config writes its own over that of the MLA config.
    "rotary_base": TINY.rotary_base,
}
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}


def spec(config, vp_stage=None):
    """A user's own, for ``--spec``."""
    return get_absorbed_mla_decoder_block_spec(config, options=OPTIONS, vp_stage=vp_stage)


def gpt(**changes) -> nn.Module:
    """This process's stage of a model with two dense layers and MTP."""
    models = builders()
    config = config_for(TINY, torch.float32, num_layers=2, mtp_num_layers=1, **changes)
    made = models.GPTModelConfig(transformer=config, transformer_layer_spec=spec, **SIZES)
    made.builder = "specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder"
    return built(made)


def hybrid(pattern: str, **changes) -> nn.Module:
    """This process's stage of a model of dense layers without MTP."""
    models = builders()
    config = config_for(TINY, torch.float32, num_layers=4, **changes)
    stack = get_absorbed_mla_hybrid_stack_spec(config, options=OPTIONS)
    return built(
        models.HybridModelConfig(
            transformer=config, hybrid_stack_spec=stack, hybrid_layer_pattern=pattern, **SIZES
        )
    )


def builders():
    """Megatron's configs of models and their builders."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # Python 3.12's
    from megatron.training import models

    return models


def built(model_config) -> nn.Module:
    builder = model_config.get_builder_cls()(model_config)
    model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
    return model.to(world.device())


def step(model: nn.Module) -> torch.Tensor | None:
    """Gradients of one batch by Megatron's schedule; the loss on the last stage."""

    def forward(_, stage):
        losses = call(stage, labels=token_batch(6))
        return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(()),
        model=[model],
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
    )
    return found[0]["loss"] if found else None


def check_gradients(stage: nn.Module, expected: dict) -> None:
    """By the whole model's names; the embedding's is in parts where two stages have it."""
    checked = 0
    for name, parameter in stage.named_parameters():
        if not name.startswith("embedding."):
            assert relative_error(parameter.grad, expected[name]) < 1e-5, name
            checked += 1
    assert checked >= 4


def test_mtp_without_decoder_layers(folder):
    """Its attention has the options of the decoder, none of whose layers are there."""
    with world.parallel():
        whole = gpt()
        save_model_weights(whole, folder)
        expected = step(whole)
    with world.parallel(pipeline_model_parallel_size=2):
        model = gpt(**STAGES, pipeline_model_parallel_layout="Ett|mL")
        load_model_weights(model, folder)
        loss = step(model)
    if world.rank() == 0:
        assert len(model.decoder.layers) == 2 and not hasattr(model, "mtp")
        assert loss is None
    else:
        assert not model.decoder.layers
        [layer] = model.mtp.layers
        attention = layer.mtp_model_layer.self_attention
        assert isinstance(attention, AbsorbedMLASelfAttention) and attention.options == OPTIONS
        torch.testing.assert_close(loss, expected)
    check_gradients(model, {name: p.grad for name, p in whole.named_parameters()})


def test_hybrid_model(folder):
    """Stages as the pattern divides them, from the checkpoint of a GPTModel in one piece."""
    with world.parallel():
        config = {"num_layers": 2}
        block = spec(config_for(TINY, torch.float32, **config))
        whole = gpt_model(spec=block, **config)
        save_model_weights(whole, folder)
        expected = step(whole)
    with world.parallel(pipeline_model_parallel_size=2):
        model = hybrid("+-+|-", **STAGES)
        load_model_weights(model, folder)
        loss = step(model)
    assert len(model.decoder.layers) == (3, 1)[world.rank()]
    assert loss is None if world.rank() == 0 else torch.equal(loss, expected)
    # Layers of a stage count from 0.
    first = 3 * world.rank()
    names = {to_hybrid_name(name): p.grad for name, p in whole.named_parameters()}
    local = re.compile(r"(?<=decoder\.layers\.)\d+")
    check_gradients(
        model, {local.sub(lambda n: str(int(n[0]) - first), name): g for name, g in names.items()}
    )
