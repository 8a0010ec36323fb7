"""GPT models cut over pipeline stages and experts' ranks, and Megatron's schedules for them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.packed_router import use_packed_router
from absorbed_mla.serving.weights.global_names import global_parameter_names
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.layouts import Layout, dense, packed
from tests.support.models import MIXED, VOCAB

LAYOUTS = {"sbhd": dense(16, 2), "thd": packed((5, 1, 3, 7))}
DENSE = {"num_layers": 4}
EXPERTS = {
    **MIXED,
    **DENSE,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained, however it is cut; with ``experts``, layers but the first have them.

    ``fields`` are more of Megatron's config, ``options`` more of the layers.
    """

    form: str = "auto"
    experts: bool = False
    mtp_layers: int | None = None
    dtype: torch.dtype = torch.float32
    mla: OracleMLA = TINY
    batch_invariant: bool = False
    packed_router: bool = False
    fields: tuple[tuple[str, object], ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def build(self) -> list[GPTModel]:
        """This rank's part in the parallel layout of the moment, one for each virtual stage."""
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        config = config_for(
            self.mla,
            self.dtype,
            mtp_num_layers=self.mtp_layers,
            tensor_model_parallel_size=world.tp_size(),
            context_parallel_size=world.cp_size(),
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
            pipeline_dtype=self.dtype,
            # Megatron's interleaved schedule over gloo hangs without it, also with its own MLA.
            overlap_p2p_comm=virtual is not None,
            batch_p2p_comm=virtual is None,
            **{**DENSE, **(EXPERTS if self.experts else {}), **dict(self.fields)},
        )
        return [self._chunk(config, None if virtual is None else i) for i in range(virtual or 1)]

    def _chunk(self, config, vp_stage: int | None) -> GPTModel:
        options = AbsorbedMLAOptions(
            form=self.form, batch_invariant=self.batch_invariant, **dict(self.options)
        )
        spec = get_absorbed_mla_decoder_block_spec(
            config, backend="local", options=options, vp_stage=vp_stage
        )
        mtp = None
        if self.mtp_layers:
            mtp = get_absorbed_mla_mtp_block_spec(
                config, backend="local", options=options, vp_stage=vp_stage
            )
        for block in (spec, mtp) if self.packed_router else ():
            if block is not None:
                use_packed_router(block)
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        return GPTModel(
            config,
            transformer_layer_spec=spec,
            mtp_block_spec=mtp,
            vocab_size=VOCAB,
            max_sequence_length=LAYOUTS["sbhd"].tokens,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            vp_stage=vp_stage,
        ).to(world.device(), self.dtype)


@dataclass(frozen=True)
class Microbatch:
    tokens: Tensor
    positions: Tensor
    labels: Tensor
    packed: PackedSeqParams | None


def microbatches(layout: Layout, seeds: Sequence[int]) -> list[Microbatch]:
    """Random ones, one for each seed."""
    shape = (layout.batch, layout.tokens)
    positions = torch.arange(layout.tokens, device=world.device()).expand(shape)
    found = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, shape, generator=generator).to(world.device())
        params = layout.packed_seq_params(world.device())
        found.append(Microbatch(tokens, positions, tokens.roll(-1, 1), params))
    return found


def weights(chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
    """This rank's parameters by their names in the whole model."""
    named = [global_parameter_names(one, dict(one.named_parameters())) for one in chunks]
    return {name: parameter for each in named for name, parameter in each.items()}


@torch.no_grad()
def load(chunks: Sequence[GPTModel], whole: dict[str, Tensor]) -> None:
    """Copy weights of the whole model."""
    for name, parameter in weights(chunks).items():
        parameter.copy_(whole[name])


def train_step(
    chunks: Sequence[GPTModel], layout: Layout, batches: Sequence[Microbatch]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses on the last stage, and gradients as Megatron's optimizer gets them.

    The balancing losses of experts add to the gradients.
    """
    # The tracker has the layers of the process's first model.
    destroy_moe_metrics_tracker()
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig()
    wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
    data: list[Iterator[Microbatch]] = [iter(batches) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=wrapped if len(chunks) > 1 else wrapped[0],
        num_microbatches=len(batches),
        seq_length=layout.tokens,
        micro_batch_size=layout.batch,
        forward_only=False,
    )
    gradients = {name: p.main_grad.clone() for name, p in weights(chunks).items()}
    return [one["loss"] for one in losses], gradients


def _forward_step(
    data: Iterator[Microbatch], model: DistributedDataParallel, return_schedule_plan: bool = False
):
    """The schedule that overlaps the exchange of experts' tokens asks for a plan of the layers."""
    batch = next(data)
    function = model.build_schedule_plan if return_schedule_plan else model
    output = function(
        batch.tokens,
        batch.positions,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed,
    )
    return output, _loss


def _loss(output: Tensor):
    loss = output.float().mean()
    return loss, {"loss": loss.item()}


def whole_weights(model: Model) -> dict[str, Tensor]:
    """Of one model in the tensor-parallel layout of the moment; the same on all such ranks."""
    return _whole_weights(
        model, world.tp_size(), parallel_state.get_expert_tensor_parallel_world_size()
    )


@functools.cache
def _whole_weights(model: Model, tp: int, expert_tp: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: p.detach().clone() for name, p in weights(model.build()).items()}
