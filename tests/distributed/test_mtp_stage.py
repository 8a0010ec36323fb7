"""A last pipeline stage with multi-token prediction (MTP) and without decoder layers.

Built by Megatron's own builder, with our attention in the MTP layer, and trained for a step.
"""

from __future__ import annotations

import typing

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.checkpoint.distributed import load_model_weights, save_model_weights
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.models import BATCH, TOKENS, VOCAB, call, token_batch
from tests.support.numerics import relative_error

pytestmark = needs.processes(2)

OPTIONS = AbsorbedMLAOptions(latent_norm_eps=1e-3)
STAGES = {
    "pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.float32,
    "pipeline_model_parallel_layout": "Ett|mL",
}


def spec(config, vp_stage=None):
    """A user's own, for ``--spec``."""
    return get_absorbed_mla_decoder_block_spec(config, options=OPTIONS, vp_stage=vp_stage)


def built(**changes) -> nn.Module:
    """This process's stage of the model."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # Python 3.12's
    from megatron.training.models.gpt import GPTModelConfig

    config = config_for(TINY, torch.float32, num_layers=2, mtp_num_layers=1, **changes)
    made = GPTModelConfig(
        transformer=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        seq_length=TOKENS,
        position_embedding_type="rope",
    )
    made.builder = "specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder"
    builder = made.get_builder_cls()(made)
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


def test_trains_as_one_process_does(folder):
    with world.parallel():
        whole = built()
        save_model_weights(whole, folder)
        expected = step(whole)
    with world.parallel(pipeline_model_parallel_size=2):
        model = built(**STAGES)
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
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    checked = 0
    for name, parameter in model.named_parameters():
        if name.startswith("embedding."):
            continue  # both stages have a part of its gradient
        assert relative_error(parameter.grad, gradients[name]) < 1e-5, name
        checked += 1
    assert checked > 10
