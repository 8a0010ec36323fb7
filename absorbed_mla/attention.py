"""Multi-head latent attention with matrix absorption, as a Megatron-Core attention module."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, checkpoint
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.batch_invariant.requirements import require_enabled, settle_options
from absorbed_mla.checkpoint.hooks import register_load_hooks
from absorbed_mla.checkpoint.parameter_marks import keep_parameter_marks
from absorbed_mla.context_parallel.strategy import ContextParallel
from absorbed_mla.core_attention.attend import AttentionPlan
from absorbed_mla.core_attention.module import CAUSAL_MASKS
from absorbed_mla.core_attention.window import window_of
from absorbed_mla.dims import MLADims, softmax_scale
from absorbed_mla.fp8 import keep_original_input, refuse_unsupported_fp8
from absorbed_mla.graph_capture import (
    attach_recomputed_parameters,
    capturable_mask,
    captures_attention,
    refuse_uncapturable_config,
)
from absorbed_mla.inference.attention import CachedAttention
from absorbed_mla.inference.latent_writer import LatentWriter
from absorbed_mla.kernels.transposed_product import warn_of_lost_rows
from absorbed_mla.linear import own_output, refuse_other_up_projections
from absorbed_mla.megatron_interface import MegatronInterface
from absorbed_mla.megatron_names import ATTENTION, GENERATION, PP_LAYER_OFFSET
from absorbed_mla.muon import KVUp, mark_kv_up
from absorbed_mla.norm import has_few_rows
from absorbed_mla.offloading import StageOffloading, on_device
from absorbed_mla.once_differentiable import refuse_graph_of_gradients
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.output_gate import gate_width, gated
from absorbed_mla.projections import (
    AbsorbedMLASelfAttentionSubmodules,
    ProjectionBuilder,
    down_layers,
)
from absorbed_mla.query_scaling import QueryScaling, scale_queries
from absorbed_mla.recomputed_outputs import SameLayout
from absorbed_mla.rope import RotaryTable, rotate_tail, rotates
from absorbed_mla.sequences import SequenceLayout
from absorbed_mla.tensor_parallel import enter_head_parallel, leave_column_parallel
from absorbed_mla.unsupported import (
    refuse_full_iterations,
    refuse_other_variant,
    refuse_shared_prefixes,
    refuse_unsupported_arguments,
    refuse_unsupported_config,
    refuse_unsupported_inference,
    refuse_unsupported_input,
    variant_of_mla,
)


class AbsorbedMLASelfAttention(MegatronInterface):
    """Multi-head latent self-attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    hidden_states -> projections -> absorb -> rope -> [context parallel] -> core attention
    -> V up-projection -> [gate] -> linear_proj. The form decides where the K and V up-projections
    multiply.

    The signature is the host's; ``options`` says how to execute.

    Args:
        config: Megatron's MLA config.
        submodules: From ``specs.absorbed_mla_layer_specs``.
        layer_number: 1-based number of the layer.
        attn_mask_type: Which keys a token may see.
        cp_comm_type: How context-parallel ranks exchange latents: ``"all_gather"``, ``"p2p"`` or
            ``"auto"`` (None).
        pg_collection: Process groups; None takes Megatron's global ones.
        pp_layer_offset: Passed on to the host.
        name: Name of the module instance, passed on to its linear layers.
        is_mtp_layer: Whether it is a layer of an MTP block; Megatron's branch ``dev`` says so.
        options: None for the defaults.

    Raises:
        ValueError: If the config asks for something unsupported or inconsistent.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: AbsorbedMLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
        is_mtp_layer: bool = False,
        options: AbsorbedMLAOptions | None = None,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        options = AbsorbedMLAOptions.coerce(options)
        refuse_unsupported_config(config)
        if config.cuda_graph_impl == "transformer_engine" and captures_attention(config):
            refuse_uncapturable_config(config)  # Graphs of that kind are for training only.
        tp_size = pg_collection.tp.size()
        options = settle_options(
            options, config, causal=attn_mask_type in CAUSAL_MASKS, tp_size=tp_size
        )
        dims = MLADims.from_config(config, tp_size)
        down = down_layers(config, dims)
        super().__init__(
            config=config,
            # The host would build both for ordinary attention, at other sizes.
            submodules=replace(submodules, core_attention=_not_built, linear_proj=_not_built),
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
            pp_layer_offset=pp_layer_offset,
            name=name,
        )
        self.dims = dims
        self.is_mtp_layer = is_mtp_layer
        self.options = options
        self.down_layers = down
        window = window_of(config, layer_number, causal=attn_mask_type in CAUSAL_MASKS)
        whole = variant_of_mla(config) is not None
        cp_group = getattr(pg_collection, "cp", None)
        self.context_parallel = ContextParallel(cp_group, cp_comm_type, dims, whole, window)
        self.sequence_parallel = config.sequence_parallel and tp_size > 1
        self.recompute_up_proj = (
            config.recompute_granularity == "selective"
            and "mla_up_proj" in config.recompute_modules
        )
        self.offloading = StageOffloading.of(config, self.parameters)
        self.softmax_scale = softmax_scale(config, dims)
        self.rotary = RotaryTable(config, options.rope_factors)
        self.rotates = rotates(config, layer_number)
        self.query_scaling = QueryScaling.of(options, config)
        self._build_projections(ProjectionBuilder(submodules, config, options, pg_collection, name))
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            dims=dims,
            attn_mask_type=attn_mask_type,
            softmax_scale=self.softmax_scale,
            options=options,
            layer_number=layer_number,
            cp_comm_type=self.context_parallel.cp_comm_type,
            pg_collection=pg_collection,
            name=f"{name}.core_attention" if name is not None else None,
        )
        refuse_other_variant(config, self.core_attention)
        self.cached_attention = CachedAttention(dims, self.softmax_scale, options, window)
        self.latent_writer = LatentWriter(dims, self.cached_attention)
        register_load_hooks(self, dims)
        keep_parameter_marks(self)

    def _build_projections(self, build: ProjectionBuilder) -> None:
        """Queries and keys from latents, and the output; widths as in ``dims``."""
        dims, config = self.dims, self.config
        query_width = dims.num_heads * dims.qk_head_dim
        if dims.q_lora_rank is None:
            self.linear_q_proj = build.linear(
                "linear_q_proj", dims.hidden_size, query_width, gather_output=False
            )
        else:
            self._add_down_projection(build, 0)
            self.q_layernorm = build.norm("q_layernorm", dims.q_lora_rank)
            self.linear_q_up_proj = build.linear(
                "linear_q_up_proj", dims.q_lora_rank, query_width, gather_output=False
            )
        self._add_down_projection(build, -1)
        self.kv_layernorm = build.norm("kv_layernorm", dims.kv_lora_rank)
        self.k_rope_layernorm: nn.Module | None = None
        if self.options.k_rope_layernorm:
            self.k_rope_layernorm = build.norm("k_rope_layernorm", dims.qk_rope_head_dim)
        self.linear_k_up_proj = build.linear(
            "linear_k_up_proj",
            dims.kv_lora_rank,
            dims.num_heads * dims.qk_nope_head_dim,
            head_dim=dims.qk_nope_head_dim,
        )
        self.linear_v_up_proj = build.linear(
            "linear_v_up_proj",
            dims.kv_lora_rank,
            dims.num_heads * dims.v_head_dim,
            head_dim=dims.v_head_dim,
        )
        choice = KVUp(self.options.muon_kv_up, (dims.qk_nope_head_dim, dims.v_head_dim))
        mark_kv_up(self.linear_k_up_proj.weight, self.linear_v_up_proj.weight, choice)
        self.linear_gate: nn.Module | None = None
        gate = gate_width(self.options, config, dims)
        if gate is not None:
            self.linear_gate = build.linear(
                "linear_gate", dims.hidden_size, gate, gather_output=False
            )
        self.linear_proj = build.linear(
            "linear_proj",
            dims.num_heads * dims.v_head_dim,
            dims.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            input_is_parallel=True,
        )
        refuse_unsupported_fp8(config, self.linear_proj)
        # The expanded form keeps its output for backward, unless that is recomputed.
        kept = self.options.form != "absorbed" and not self.checkpoint_core_attention and not gate
        if kept and config.fp8 and config.fp8_recipe != "delayed":
            keep_original_input(self.linear_proj)

    def _add_down_projection(self, build: ProjectionBuilder, which: int) -> None:
        """The first (0) or the last (-1) of the down-projections, once where that is the same."""
        name, widths = list(self.down_layers.items())[which]
        if name not in self._modules:
            self.add_module(name, build.down_projection(name, widths))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        position_ids: Tensor | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Latent attention; see the class for the stages.

        Args:
            hidden_states: [S, B, hidden_size], packed sequences [S, 1, hidden_size]; S / tp tokens
                under sequence parallelism. dtype of the parameters. Under context parallelism, S
                counts this rank's chunks (``context_parallel.layout``).
            attention_mask: Bool, True hides a key: [B or 1, 1, S or 1, S * cp], or None. It hides
                keys in addition to those that ``attn_mask_type`` hides; beside a pack, and with
                sparse attention, it must hide no more, which is looked up once for all layers.
            inference_context: Megatron's static or dynamic context, which keeps the latents of
                earlier tokens; ``inference_params`` is its former name.
            packed_seq_params: Megatron's boundaries of packed sequences (``thd``), of the whole
                pack, and the context-parallel group of this call where it differs. Those of a
                ``PrefixTree`` say which sequences continue which.

        Returns:
            Output in the layout of ``hidden_states``, and the output bias or None.

        Raises:
            ValueError: For arguments that are unsupported or do not fit each other.
        """
        refuse_unsupported_arguments(
            key_value_states=key_value_states,
            rotary_pos_emb=rotary_pos_emb,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            rotary_pos_cos_sin=rotary_pos_cos_sin,
            attention_bias=attention_bias,
            position_ids=position_ids,
            sequence_len_offset=sequence_len_offset,
        )
        refuse_other_up_projections(self.linear_k_up_proj, self.linear_v_up_proj)
        refuse_unsupported_input(hidden_states, self.dims, self.linear_k_up_proj.weight.dtype)
        if self.options.batch_invariant:
            require_enabled(hidden_states.device, self.config)
        if inference_context is None:
            inference_context = inference_params
        if inference_context is not None:
            return self._infer(hidden_states, attention_mask, inference_context, packed_seq_params)
        if self.config.cuda_graph_impl != "none" and torch.is_grad_enabled():
            refuse_full_iterations(self.config)
            attention_mask = capturable_mask(self.config, attention_mask, packed_seq_params)
        if hidden_states.is_cuda and not self.config.sequence_parallel:
            warn_of_lost_rows(hidden_states)
        plan = self._plan(hidden_states, attention_mask, packed_seq_params)
        # The layers that own W_UK and W_UV are called, so that Megatron's parameter gather waits in
        # their hooks; the weights are arguments below, so that checkpoints return their gradients.
        w_uk, w_uv = self.linear_k_up_proj(), self.linear_v_up_proj()
        positions = plan.keys.positions(hidden_states.device)
        where = plan.keys.max_position, positions, hidden_states.device
        cos, sin = self.rotary.rows(*where)
        factors = None
        if self.query_scaling is not None:
            factors = self.query_scaling.factors(*where, hidden_states.dtype)
        # mla_up_proj: backward computes kv and query again instead of keeping them.
        up_project = None
        if self._recomputes_up_proj:
            up_project = CheckpointWithoutOutput(fp8=self.config.fp8 or None)
        run = up_project.checkpoint if up_project else _call
        if up_project and self.offloading:
            run = partial(on_device, run)

        def project(hidden_states: Tensor) -> tuple[Tensor, ...]:
            q_down, kv_down = self._down_project(hidden_states)
            stage = partial(self._up_project, plan, factors)
            args = q_down, kv_down, w_uk, *self._rotation(cos, sin)
            return *run(SameLayout(stage) if up_project else stage, *args), q_down

        offload = self.offloading.run if self.offloading else _on_device_stage
        kv, *query, q_down = offload("qkv_linear", project, hidden_states)
        # Sparse attention only: the indexer's choice of keys here, its loss below.
        query_latent = partial(self._query_latent, q_down)
        choose, trained = self.core_attention.choose_keys, w_uk.requires_grad
        plan = choose(plan, hidden_states, query_latent, cos, sin, trained=trained)
        attend = partial(self._core_attention, plan, w_uk, w_uv)
        recomputed = (kv, *query) if up_project else ()
        core_out, lse = offload("core_attn", attend, kv, *query, kept=recomputed)
        core_out = self.core_attention.learn_choice(plan, core_out, lse, tuple(query), kv)
        if up_project:
            up_project.discard_output_and_register_recompute(core_out)
            refuse_graph_of_gradients(core_out)
        return offload("attn_proj", self._project_output, core_out, hidden_states)

    def _infer(
        self, hidden_states: Tensor, attention_mask: Tensor | None, context: Any, packed: Any
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward` over cached latents, from the live weights."""
        refuse_unsupported_inference(
            self.config,
            context,
            attention_mask,
            packed,
            self._tokens_and_batch(hidden_states),
            causal=self.core_attention.causal,
            cp_size=self.context_parallel.size,
        )
        q_down, kv_down = self._down_project(hidden_states)
        norms = self._modules.get("q_layernorm"), self.kv_layernorm
        # Under sequence parallelism, which Megatron switches off at times, a rank has some tokens.
        few = has_few_rows(kv_down) and not self.sequence_parallel
        few &= self.rotates and self.k_rope_layernorm is None
        at_once = few and self.latent_writer.may_run(*norms, kv_down)
        kv = kv_down if at_once else self._latent(kv_down)
        layer_offset = getattr(self, PP_LAYER_OFFSET.name, None)
        if layer_offset is None:
            GENERATION.require({ATTENTION: self})
        step = self.cached_attention.open_step(context, self.layer_number, layer_offset, kv)
        cos_sin = self.cached_attention.cos_sin(step, self.rotary, kv.device)
        rotation = self._rotation(*cos_sin)
        kv = step.pack(kv)
        if at_once:
            query_latent, kv = self.latent_writer.write(step, *norms, q_down, kv, rotation)
        else:
            kv = rotate_tail(kv, *rotation, num_heads=1)
            step.write(self.cached_attention.rows(kv))
            query_latent = self._query_latent(q_down)
        query = self._query(query_latent)
        # Sparse attention only: the indexer's choice of keys.
        choose = self.core_attention.choose_cached_keys
        chosen = choose and choose(step, hidden_states, lambda: query_latent, *cos_sin)
        weights = self.linear_k_up_proj(), self.linear_v_up_proj(), self._sink
        query = step.pack_queries(query)
        if self.query_scaling is not None:
            query = self.query_scaling.in_step(step, query)
        core_out = self.cached_attention(step, query, kv, weights, rotation, chosen)
        return self._project_output(step.unpack(core_out.flatten(2)), hidden_states)

    @property
    def _sink(self) -> Tensor | None:
        return self.core_attention.softmax_offset

    @property
    def _recomputes_up_proj(self) -> bool:
        return self.recompute_up_proj and self.training

    def _plan(
        self, hidden_states: Tensor, attention_mask: Tensor | None, packed_seq_params: Any
    ) -> AttentionPlan:
        """Check the input, find its sequences, and settle how to compute their attention."""
        group = self.context_parallel.group_of(packed_seq_params)
        cp_size = 1 if group is None else group.size()
        tokens, batch = self._tokens_and_batch(hidden_states)
        layout = SequenceLayout.from_host(packed_seq_params, tokens * cp_size)
        if layout.packed and batch != 1:
            raise ValueError(f"packed sequences need hidden_states of batch 1, got {batch}")
        if layout.tree is not None:
            refuse_shared_prefixes(
                self.config,
                window=self.cached_attention.window,
                causal=self.core_attention.causal,
                training=self.training,
            )
        keys = self.context_parallel.keys(
            group,
            layout,
            batch,
            hidden_states.dtype,
            causal=self.core_attention.causal,
            recomputed=self._recomputes_up_proj,
        )
        return self.core_attention.plan(keys, layout, cp_size, hidden_states, attention_mask)

    def _tokens_and_batch(self, hidden_states: Tensor) -> tuple[int, int]:
        """S and B of this context-parallel rank, over all tensor-parallel ranks."""
        tp_size = self.pg_collection.tp.size() if self.sequence_parallel else 1
        return hidden_states.shape[0] * tp_size, hidden_states.shape[1]

    def _down_project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed query [S or S/tp, B, q_lora_rank] (or the input) and [latent | k_rope]."""
        outputs = [hidden_states] if self.dims.q_lora_rank is None else []
        for name, widths in self.down_layers.items():
            out, _ = getattr(self, name)(hidden_states)
            outputs += leave_column_parallel(out, widths, self.tp_group, self.sequence_parallel)
        q_down, kv_down = outputs
        if self._recomputes_up_proj and torch.is_grad_enabled():
            # Megatron's checkpoint gives parameters inside of it a gradient only if one of its
            # inputs needs one, which is not so where all layers before this one are frozen.
            q_down, kv_down = _requiring_grad(q_down), _requiring_grad(kv_down)
            names = ("linear_q_proj", "q_layernorm", "linear_q_up_proj", "kv_layernorm")
            names = (*names, "k_rope_layernorm")
            recomputed = [self._modules[name] for name in names if self._modules.get(name)]
            q_down, kv_down = attach_recomputed_parameters(recomputed, self.config, q_down, kv_down)
        return q_down, kv_down

    def _up_project(
        self,
        plan: AttentionPlan,
        factors: Tensor | None,
        q_down: Tensor,
        kv_down: Tensor,
        w_uk: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, ...]:
        """The stages between the down-projections and the core attention.

        Returns:
            kv [S, B, C + R] and the form's query, rotated. None shares memory with an argument, so
            that recomputation can drop all of them.
        """
        # Latents first: context-parallel ranks exchange them while the query is computed.
        kv = rotate_tail(self._latent(kv_down), cos, sin, num_heads=1)
        if self.options.train_on_cached_latents:
            kv = self.cached_attention.rounded(kv)
        kv = plan.keys.start(kv)
        query = self._query(self._query_latent(q_down))
        if factors is not None:
            query = scale_queries(query, factors)
        return kv, *plan.form.query(query, w_uk, cos, sin)

    def _query(self, query_latent: Tensor) -> Tensor:
        """[q_nope | q_rope] of this rank's heads, [S, B, N * (nope + R)], not rotated.

        The form may rotate it in place.
        """
        direct = self.dims.q_lora_rank is None
        return own_output(self.linear_q_proj if direct else self.linear_q_up_proj, query_latent)

    def _query_latent(self, q_down: Tensor) -> Tensor:
        """What the query is projected from: the normalised compressed query, or the input."""
        return q_down if self.dims.q_lora_rank is None else self.q_layernorm(q_down)

    def _latent(self, kv_down: Tensor) -> Tensor:
        """[latent | k_rope] [S, B, C + R] of all tokens, normalised and not rotated."""
        widths = [self.dims.kv_lora_rank, self.dims.qk_rope_head_dim]
        latent, k_rope = kv_down.split(widths, dim=-1)
        if self.k_rope_layernorm is not None:
            k_rope = self.k_rope_layernorm(k_rope)
        kv = torch.cat((self.kv_layernorm(latent), k_rope), dim=-1)
        return enter_head_parallel(kv, self.tp_group, self.sequence_parallel)

    def _rotation(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of the attention's own channels: of none where the layer does not rotate them."""
        return (cos, sin) if self.rotates else (cos[:, :0], sin[:, :0])

    def _project_output(
        self, core_out: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """``linear_proj`` of the output of the attention [S, B, N * v], gated by the input."""
        if self.linear_gate is not None:
            core_out = gated(core_out, self.linear_gate(hidden_states)[0])
        return self.linear_proj(core_out)

    def _core_attention(
        self, plan: AttentionPlan, w_uk: Tensor, w_uv: Tensor, kv: Tensor, *query: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[S, B, N * v], recomputed in backward if ``core_attn`` is among recompute_modules.

        Returns:
            Also the LSE [S, B, N], without gradient.
        """

        def run(w_uk, w_uv, sink, kv, *query):
            out, lse = self.core_attention(plan, query, kv, w_uk, w_uv, sink)
            return out.flatten(2), lse.detach()

        if self.checkpoint_core_attention and self.training:
            core_out, lse = checkpoint(run, False, w_uk, w_uv, self._sink, kv, *query)
            refuse_graph_of_gradients(core_out)
            return core_out, lse.detach()
        return run(w_uk, w_uv, self._sink, kv, *query)


def _call(function, *args):
    return function(*args)


def _on_device_stage(name: str, stage, *args, kept=()):
    """A stage whose activations stay where they are; see ``StageOffloading.run``."""
    return stage(*args)


def _requiring_grad(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def _not_built(*args, **kwargs) -> None:
    """Leave a slot of the host's constructor empty; the subclass fills it."""
