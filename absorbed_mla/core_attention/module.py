"""The module in Megatron's ``core_attention`` slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor, nn

from absorbed_mla.caching import DerivedTables
from absorbed_mla.core_attention.attend import AttentionPlan, attend
from absorbed_mla.core_attention.backend import (
    DETERMINISM_REQUIRED,
    AttentionBackend,
    AttentionRequest,
)
from absorbed_mla.core_attention.cost import Work
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.forms.base import Form, Query
from absorbed_mla.core_attention.forms.expanded import ExpandedForm
from absorbed_mla.core_attention.key_source import TrainableKeySource
from absorbed_mla.core_attention.masks.redundant import refuse_hidden_keys
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.path_keys import PathBackend
from absorbed_mla.core_attention.selection import (
    candidates,
    choose_batch_invariant,
    fastest,
    invariant_name,
)
from absorbed_mla.core_attention.shared_prefix import SharedPrefixBackend
from absorbed_mla.core_attention.sink import NAME, add_softmax_offset
from absorbed_mla.core_attention.window import WindowedBackend, window_of
from absorbed_mla.dims import MLADims
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.sequences import SequenceLayout

# Types of mask in which a token sees itself and earlier tokens only.
CAUSAL_MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_NO_SPANS = Spans()


class LatentCoreAttention(nn.Module):
    """Attention over the latent, given the query, the latent and the up-projection weights.

    It chooses the form: to absorb W_UK into the query, or to expand keys and values.

    Args:
        config: Read for ``attention_dropout``, ``softmax_type``, ``window_size`` and, in every
            forward, for ``qk_clip``, ``qk_clip_threshold`` and ``log_max_attention_logit``.
        dims: Dimensions of the layer on this rank.
        attn_mask_type: Which keys a token may see.
        softmax_scale: Multiplies the scores.
        options: Form, backend and chunk sizes.
        layer_number: Of the layer in the model, from 1, which says whether it has a window.
        pg_collection: Process groups, of which ``tp`` is used; None for Megatron's global ones.
        _layer: What other kinds of core attention must know of their layer.

    Attributes:
        softmax_offset: The sink's logits of this rank's heads, [N]; None with
            ``softmax_type="vanilla"``. Megatron's name.
        window: Keys that a token sees, itself included; None for all before it.
        current_max_attn_logits: The largest scaled score of each head of this rank over its tokens,
            in all training forwards since this was None: [N] fp32 (fp64). Megatron's name. None
            unless ``qk_clip`` or ``log_max_attention_logit`` asks for it. With ``qk_clip`` alone a
            value up to ``qk_clip_threshold``, which clips nothing, may be an upper bound of it.
    """

    # What of ``experimental_attention_variant`` it computes.
    variant: str | None = None
    # The choice of keys for new tokens of an inference step; see ``SparseCoreAttention``.
    choose_cached_keys: Callable[..., Any] | None = None

    def __init__(
        self,
        config: MLATransformerConfig,
        dims: MLADims,
        attn_mask_type: AttnMaskType,
        softmax_scale: float,
        options: AbsorbedMLAOptions,
        *,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_layer: Any,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.attn_mask_type = attn_mask_type
        self.causal = attn_mask_type in CAUSAL_MASKS
        self.softmax_scale = softmax_scale
        self.attention_dropout = config.attention_dropout
        self.options = options
        self.current_max_attn_logits: Tensor | None = None
        self._config = config
        tp_group = None if pg_collection is None else pg_collection.tp
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        self.window = window_of(config, layer_number, causal=self.causal)
        add_softmax_offset(self, config, dims, self.tp_group)
        self._forms: dict[str, Form] = {
            "absorbed": AbsorbedForm(),
            "expanded": ExpandedForm(options.expansion_chunk_size),
        }
        # What can run a kind of call, and what was chosen for a layout of sequences: asked once.
        self._candidates = DerivedTables()
        self._choices = DerivedTables()

    def plan(
        self,
        keys: TrainableKeySource,
        layout: SequenceLayout,
        cp_size: int,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
    ) -> AttentionPlan:
        """Check the mask, and settle form, backend and score rules of one call.

        Args:
            keys: Where keys come from.
            layout: The whole sequences, of all context-parallel ranks.
            cp_size: Number of context-parallel ranks.
            hidden_states: [S or S / tp, B, hidden_size], for its batch, dtype and device.
            attention_mask: As in the layer's ``forward``.

        Raises:
            ValueError: If the mask does not fit ``attn_mask_type``, the layout or the batch, or the
                backend cannot do what is asked.
        """
        device, batch = hidden_states.device, hidden_states.shape[1]
        self._check_mask(layout, cp_size, batch, attention_mask, device)
        if layout.packed and attention_mask is not None:
            refuse_hidden_keys(attention_mask, layout, keys.query_tokens(device), self.causal)
            attention_mask = None
        dropout = self.attention_dropout if self.training else 0.0
        rules = ScoreRules(
            scale=self.softmax_scale,
            spans=_NO_SPANS,
            attention_mask=attention_mask,
            dropout=dropout,
            dropout_seed=_draw_dropout_seed(device) if dropout else 0,
            query_tokens=keys.query_tokens(device) if dropout else None,
            query_chunk_size=self.options.query_chunk_size,
            max_logits=self._max_logits(hidden_states),
        )
        request = {
            "device": device,
            "dtype": hidden_states.dtype,
            "masked": attention_mask is not None,
            "dropout": bool(dropout),
            # Under context parallelism a rank has two parts of each sequence.
            "packed": layout.packed or (cp_size > 1 and batch == 1),
            "deterministic": torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED,
            "max_logits": rules.max_logits is not None,
            "small_max_logits": rules.max_logits is not None
            and rules.max_logits.threshold == -torch.inf,
        }
        empty = not hidden_states.numel()
        form, backend = self._choices.get(
            (layout, batch, cp_size, self.training, empty, *request.values()),
            lambda: self._choose(keys, layout, batch, cp_size, empty, request),
        )
        if self.window is not None:
            backend = WindowedBackend(backend, self.window)
        if layout.tree is not None:
            whole = self.options.batch_invariant
            backend = PathBackend(backend, layout.tree) if whole else SharedPrefixBackend(backend)
        return AttentionPlan(form, backend, keys, rules)

    def _max_logits(self, hidden_states: Tensor) -> MaxLogits | None:
        """Where this forward records the largest scores, with those of the forwards before it."""
        logs = getattr(self._config, "log_max_attention_logit", False)
        if not self.training or not (logs or getattr(self._config, "qk_clip", False)):
            return None
        if self.current_max_attn_logits is None:
            heads = self.dims.num_heads_per_rank
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            self.current_max_attn_logits = hidden_states.new_full((heads,), -torch.inf, dtype=dtype)
        threshold = -torch.inf if logs else self._config.qk_clip_threshold
        return MaxLogits(self.current_max_attn_logits, threshold)

    def _choose(
        self,
        keys: TrainableKeySource,
        layout: SequenceLayout,
        batch: int,
        cp_size: int,
        empty: bool,
        request: dict,
    ) -> tuple[Form, AttentionBackend]:
        options = self.options
        requests = {}
        for form in self._forms if options.form == "auto" else (options.form,):
            key_width, value_width = self._forms[form].widths(self.dims)
            requests[form] = AttentionRequest(
                form=form, key_width=key_width, value_width=value_width, **request
            )
        # Kernels are not launched for an empty batch.
        backend = "reference" if empty else options.core_attention_backend
        if options.batch_invariant:
            wanted = requests["absorbed"]
            name = backend if empty else invariant_name(options, wanted)
            return self._forms["absorbed"], choose_batch_invariant(wanted, name, keys.num_blocks)
        # By ``training``, not by whether gradients are enabled: recomputation runs the first
        # forward without them, and must get the same choice.
        work = layout.tables.get(
            ("work", batch, cp_size, self.causal, self.training, self.window),
            lambda: Work.of(layout, batch, cp_size, self.causal, self.training, self.window),
        )
        able = self._candidates.get(
            (backend, *requests.values()), lambda: candidates(requests, backend)
        )
        name, chosen = fastest(able, self.dims, work)
        return self._forms[name], chosen

    def choose_keys(
        self,
        plan: AttentionPlan,
        hidden_states: Tensor,
        query_latent: Callable[[], Tensor],
        cos: Tensor,
        sin: Tensor,
        *,
        trained: bool,
    ) -> AttentionPlan:
        """The plan with the keys that every query attends to; here all that it sees.

        Args:
            plan: From :meth:`plan`.
            hidden_states: [S or S / tp, B, hidden_size].
            query_latent: Makes the normalised latent of the query, of the same tokens.
            cos: fp32 [S, R / 2], for the positions of the tokens.
            sin: Likewise.
            trained: Whether the attention's own weights are trained, and not only an indexer.
        """
        return plan

    def learn_choice(
        self, plan: AttentionPlan, core_out: Tensor, lse: Tensor, query: Query, kv: Tensor
    ) -> Tensor:
        """``core_out``, whose backward is also that of a loss of the choice of keys; here none.

        Args:
            plan: From :meth:`choose_keys`.
            core_out: Output of the attention, [S, B, N * v].
            lse: From :meth:`forward`.
            query: As in :meth:`forward`.
            kv: As in :meth:`forward`.
        """
        return core_out

    def forward(
        self,
        plan: AttentionPlan,
        query: Query,
        kv: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention and, in the absorbed form, the V up-projection of its output.

        Args:
            plan: From :meth:`plan`.
            query: From ``plan.form.query``.
            kv: What ``plan.keys.start`` returned for [latent | k_rope].
            w_uk: [N, nope, C].
            w_uv: [N, v, C].
            sink: ``softmax_offset``, an argument as the other weights are.

        Returns:
            Output [S, B, N, v] and LSE [S, B, N] (fp32; fp64 for fp64 inputs), of the sink, too.
        """
        out, lse = attend(plan, query, kv, plan.form.weights(w_uk, w_uv), sink)
        return plan.form.output(out, w_uv), lse

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Distributed-checkpoint entries; tensor-parallel ranks share out the sink's heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {NAME: 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _check_mask(
        self,
        layout: SequenceLayout,
        cp_size: int,
        batch: int,
        mask: Tensor | None,
        device: torch.device,
    ) -> None:
        if mask is None:
            if self.attn_mask_type is AttnMaskType.arbitrary:
                raise ValueError("attn_mask_type=arbitrary needs an attention_mask, got None")
            return
        if self.attn_mask_type is AttnMaskType.no_mask and not layout.packed:
            raise ValueError(
                "attention_mask must be None for attn_mask_type=no_mask; "
                f"got a tensor of shape {tuple(mask.shape)}"
            )
        keys = layout.num_tokens
        queries = keys // cp_size
        accepted = [(b, 1, rows, keys) for b in {1, batch} for rows in {1, queries}]
        if mask.dtype != torch.bool or tuple(mask.shape) not in accepted:
            raise ValueError(
                f"attention_mask must be bool (True hides a key) of shape [{batch} or 1, 1, "
                f"{queries} or 1, {keys}], got {mask.dtype} {tuple(mask.shape)}"
            )
        if mask.device != device:
            raise ValueError(
                f"attention_mask must be on {device} like hidden_states, got {mask.device}"
            )


def _draw_dropout_seed(device: torch.device) -> int:
    """A seed from Megatron's model-parallel generator: ranks hold different heads."""
    with get_cuda_rng_tracker().fork():
        return int(torch.randint(2**62, (), device=device))
