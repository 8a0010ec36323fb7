"""DeepSeek Sparse Attention in Megatron's ``core_attention`` slot, with its indexer and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.core_attention.attend import AttentionPlan
from absorbed_mla.core_attention.forms.base import Query
from absorbed_mla.core_attention.key_source import WholeKeySource
from absorbed_mla.core_attention.masks.redundant import refuse_hidden_keys
from absorbed_mla.core_attention.module import CAUSAL_MASKS, LatentCoreAttention
from absorbed_mla.core_attention.path_keys import PathKeys
from absorbed_mla.dims import MLADims
from absorbed_mla.dsa.aux_loss import report_loss, with_zero_gradients
from absorbed_mla.dsa.backend import SparseRequest, TopKBackend
from absorbed_mla.dsa.backend_selector import SparseBackendSelector
from absorbed_mla.dsa.cached_attention import CachedTopKBackend
from absorbed_mla.dsa.checkpoint_scope import is_never_recomputed
from absorbed_mla.dsa.config import DSAConfig
from absorbed_mla.dsa.index_sharing import LayerSelection, Selected
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.indexer import Indexer
from absorbed_mla.dsa.key_subset import chosen_keys, visible_keys
from absorbed_mla.dsa.sequence_parallel import SequenceParallelIndexer
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.dsa.unsupported import refuse_unsupported_dsa
from absorbed_mla.inference.step import InferenceStep
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import INDEXER_BACKENDS, SPARSE_BACKENDS
from absorbed_mla.sequences import SequenceLayout
from absorbed_mla.unsupported import refuse_other_variant


@dataclass
class SparseCoreAttentionSubmodules:
    """``indexer`` is an :class:`Indexer` with its ``IndexerSubmodules``."""

    indexer: ModuleSpec | type


@dataclass(frozen=True)
class SparsePlan(AttentionPlan):
    """The plan of one call, which becomes complete with the choice of keys.

    Attributes:
        keys: Their axis is what a selection counts on.
        layout: The whole sequences, of all context-parallel ranks.
        chosen: int32 [S_q, B, topk]; None where every query has all keys that it sees.
        index: What the indexer made, if it has a loss in this call.
    """

    keys: WholeKeySource
    layout: SequenceLayout
    chosen: Tensor | None = None
    index: IndexVectors | None = None

    def paths(self, device: torch.device) -> PathKeys | None:
        """Keys of each tree node and its prefixes; None without shared prefixes."""
        tree = self.layout.tree
        return None if tree is None else PathKeys.of(self.keys.spans(), tree, device)

    def counts(self, device: torch.device) -> Tensor | None:
        """How many sequences contain each of this rank's queries, [S_q]; None: one each."""
        if self.layout.tree is None:
            return None
        return self.layout.tree.token_counts().to(device)[self.keys.query_tokens(device)]


class SparseCoreAttention(LatentCoreAttention):
    """Attention over the latents that an indexer chooses for every query.

    Where no sequence is longer than ``dsa_indexer_topk`` nothing is chosen: the attention is the
    dense one with the dense layer's backends, as while an indexer warms up.

    Args:
        config: Megatron's MLA config with ``dsa_indexer_*``.
        submodules: The indexer's spec.
        dims: Dimensions of the layer on this rank.
        attn_mask_type: A causal one.
        softmax_scale: Multiplies the scores.
        options: Backends.
        layer_number: Counted from 1, over all pipeline stages.
        cp_comm_type: ``"all_gather"``.
        pg_collection: Process groups; ``tp`` and ``cp`` are used.
        name: Name of the module instance, or None.
        is_mtp_layer: Whether it is in a layer of multi-token prediction. Those have numbers of
            their own, from 1, and each has an indexer.

    Attributes:
        indexer: None in a layer that shares the selection of an earlier one.
        indexed_layers: Numbers of the decoder's layers that have one.
        input_needs_gradient: Whether ``warm_up.require_embedding_gradient`` has seen to it.
        sequence_parallel: Whether a rank gets its own part of the tokens; Megatron's name, which it
            switches for batches of its static engine.

    Raises:
        ValueError: If the config asks for something unsupported.
    """

    variant = "dsa"

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: SparseCoreAttentionSubmodules,
        dims: MLADims,
        attn_mask_type: AttnMaskType,
        softmax_scale: float,
        options: AbsorbedMLAOptions,
        *,
        layer_number: int,
        cp_comm_type: str,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
        is_mtp_layer: bool = False,
    ) -> None:
        refuse_other_variant(config, self)
        causal = attn_mask_type in CAUSAL_MASKS
        refuse_unsupported_dsa(config, options, causal=causal, cp_comm_type=cp_comm_type)
        options = options.replace(form="absorbed")
        dense = config, dims, attn_mask_type, softmax_scale, options
        super().__init__(*dense, pg_collection=pg_collection)
        self.dsa = DSAConfig.from_config(config)
        if is_mtp_layer:
            self.dsa = replace(self.dsa, topk_freq=1)
        self.layer_number = layer_number
        self.is_mtp_layer = is_mtp_layer
        self.input_needs_gradient = False
        pp_group = getattr(pg_collection, "pp", None)
        self.selection = LayerSelection(config, self.dsa, layer_number, pp_group)
        self.indexed_layers = self.dsa.indexed_layers(config.num_layers)
        self.indexer: Indexer | None = None
        if not self.selection.shares:
            self.indexer = build_module(
                submodules.indexer,
                config=config,
                pg_collection=pg_collection,
                name=f"{name}.indexer" if name is not None else None,
            )
        self._backends = SparseBackendSelector(options, dims, self.dsa)
        self._tp_group = pg_collection.tp if pg_collection.tp.size() > 1 else None
        self.sequence_parallel = config.sequence_parallel and self._tp_group is not None

    @property
    def graph_impl(self) -> str:
        """How Megatron captures graphs of the model, which a program may switch."""
        return self._config.cuda_graph_impl

    def plan(
        self,
        keys: Any,
        layout: SequenceLayout,
        cp_size: int,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
    ) -> SparsePlan:
        """See ``LatentCoreAttention``; the attention over all visible keys.

        Raises:
            ValueError: If there is a mask that hides more keys than the causal one.
        """
        if attention_mask is not None:
            batch, device = hidden_states.shape[1], hidden_states.device
            self._check_mask(layout, cp_size, batch, attention_mask, device)
            refuse_hidden_keys(attention_mask, layout, keys.query_tokens(device), self.causal)
        dense = super().plan(keys, layout, cp_size, hidden_states, None)
        return SparsePlan(dense.form, dense.backend, keys, dense.rules, layout)

    def choose_keys(
        self,
        plan: AttentionPlan,
        hidden_states: Tensor,
        query_latent: Callable[[], Tensor],
        cos: Tensor,
        sin: Tensor,
        *,
        trained: bool,
    ) -> SparsePlan:
        """See ``LatentCoreAttention``; with the selection, and the index vectors for their loss."""
        assert isinstance(plan, SparsePlan)
        request = self._backends.request(hidden_states)
        learns = self._learns(only_indexer=not trained)
        shape = self._selection_shape(plan, request, hidden_states.shape[1])
        selected = self.selection.take(shape, hidden_states.device)
        index: IndexVectors | None = None
        if learns or (selected is None and shape is not None):
            with torch.set_grad_enabled(learns):
                index = self._whole_indexer().vectors(hidden_states, query_latent, cos, sin)
                index = index._replace(key=plan.keys.gather(index.key))
        if selected is None:
            selected = Selected(None if shape is None else self._select(index, plan, request))
        chosen = self.selection.leave(selected).chosen
        self._check_shape(chosen, shape)
        plan = replace(plan, chosen=chosen, index=index if learns else None)
        if chosen is None:
            return plan
        sparse = self._backends.get(SPARSE_BACKENDS, request)
        return replace(plan, backend=TopKBackend(sparse, chosen))

    def _select(
        self, index: IndexVectors | None, plan: SparsePlan, request: SparseRequest
    ) -> Tensor:
        """The layer's own selection."""
        assert index is not None
        spans, paths = plan.keys.spans(), plan.paths(index.key.device)
        if paths is not None:
            index, spans = index._replace(key=paths.copies(index.key)), paths.spans
        chosen: Tensor = self._backends.get(INDEXER_BACKENDS, request).select(
            index,
            spans,
            self.dsa.topk,
            relu=self.dsa.scoring_relu,
            tp_group=self._tp_group,
        )
        return chosen if paths is None else paths.on_pack(chosen)

    def choose_cached_keys(
        self,
        step: InferenceStep,
        hidden_states: Tensor,
        query_latent: Callable[[], Tensor],
        cos: Tensor,
        sin: Tensor,
    ) -> CachedTopKBackend | None:
        """Cache index keys, and choose among the cached ones for new tokens.

        Args:
            step: With the latents of the new tokens written.
            hidden_states: As in :meth:`choose_keys`.
            query_latent: Likewise.
            cos: fp32 [T, R / 2], for the positions of the step's tokens in its order.
            sin: Likewise.

        Returns:
            The paged backend of this call; None where the host knows that no request has more than
            ``dsa_indexer_topk`` keys, so that nothing is chosen.

        Raises:
            ValueError: If there are selections to replay, or the context holds no index keys.
        """
        if self.selection.replayed is not None:
            raise ValueError(
                "replay_selections is for forwards without an inference_context: cached tokens "
                "were computed with selections of their own"
            )
        request = self._backends.request(hidden_states)
        few = step.lengths is not None and self._backends.dense_serves(request, step.lengths.keys)
        shape = None if few else (len(cos), self.dsa.topk)
        index: IndexVectors | None = None
        cache: Tensor | None = None
        if self.indexer is not None:
            indexer = self._whole_indexer()
            # Rows of the table in Megatron's layout, in which every request has the same.
            cos, sin = (step.unpack(x.unsqueeze(1))[:, 0] for x in (cos, sin))
            if shape is None:
                key = indexer.key(hidden_states, cos, sin)
            else:
                index = indexer.vectors(hidden_states, query_latent, cos, sin)
                key = index.key
            cache = step.write_index_keys(step.pack(key), self.indexed_layers)
        selected = self.selection.take(shape, hidden_states.device)
        if selected is None:
            own = None if shape is None else self._select_cached(step, index, cache, request)
            selected = Selected(own)
        chosen = self.selection.leave(selected, repeated=step.lengths is None).chosen
        if chosen is None:
            return None
        request = replace(request, latent_cache_dtype=self.options.latent_cache_dtype)
        sparse = self._backends.get(SPARSE_BACKENDS, request)
        return CachedTopKBackend(sparse, chosen)

    def _select_cached(
        self,
        step: InferenceStep,
        index: IndexVectors | None,
        cache: Tensor | None,
        request: SparseRequest,
    ) -> Tensor:
        """The layer's own selection for new tokens, whose ``index`` is in Megatron's layout."""
        assert index is not None and cache is not None
        query = step.pack(index.query.flatten(2)).squeeze(1).unflatten(-1, index.query.shape[2:])
        chosen: Tensor = self._backends.get(INDEXER_BACKENDS, request).select_cached(
            query,
            step.pack(index.weights).squeeze(1),
            cache,
            step.rows,
            self.dsa.topk,
            relu=self.dsa.scoring_relu,
        )
        return chosen

    def learn_choice(
        self, plan: AttentionPlan, core_out: Tensor, lse: Tensor, query: Query, kv: Tensor
    ) -> Tensor:
        """See ``LatentCoreAttention``: the KL divergence of the indexer from the attention."""
        assert isinstance(plan, SparsePlan)
        if plan.index is None:
            unused = self.training and self.indexer is not None
            parameters = self.indexer.parameters() if unused else ()
            return with_zero_gradients(core_out, parameters)
        dsa = self.dsa
        with torch.no_grad():
            [block] = plan.keys.blocks(kv, keep=False)
        request = self._backends.request(kv)
        if plan.chosen is None:
            request = replace(request, topk=0)
        indexing = self._backends.get(INDEXER_BACKENDS, request)
        row_width = block.kv.shape[-1] if indexing.gathers_keys else 1
        index, keys = plan.index, block.kv
        subsets, over_attended = self._key_subsets(plan, keys, row_width)
        paths = None if self._over_chosen(plan) else plan.paths(kv.device)
        if paths is not None:
            index, keys = index._replace(key=paths.copies(index.key)), paths.copies(keys)
        rows = 1 if dsa.per_token_loss else max(1, sum(plan.layout.sequence_lengths) * kv.shape[1])
        loss = indexing.loss(
            index,
            latent_inputs(*query, keys),
            lse if over_attended else None,
            subsets,
            attention_scale=self.softmax_scale,
            factor=dsa.loss_coefficient / rows,
            relu=dsa.scoring_relu,
            tp_group=self._tp_group,
            counts=plan.counts(kv.device),
        )
        place, places = self._place_in_log()
        return report_loss(
            core_out, loss, layer_number=place, num_layers=places, cp_group=plan.keys.group
        )

    def _place_in_log(self) -> tuple[int, int]:
        """This layer's place, from 1, and how many there are.

        Layers of multi-token prediction follow the decoder's, as in Megatron's log of its routers.
        """
        decoder, mtp = self._config.num_layers, self._config.mtp_num_layers or 0
        place = self.layer_number
        if self.is_mtp_layer:
            # A HybridModel's may have several layers of attention, numbered within.
            place = decoder + min(place, mtp)
        return place, decoder + mtp

    def _key_subsets(self, plan: SparsePlan, kv: Tensor, row_width: int) -> tuple[Any, bool]:
        """The keys of the loss, and whether the attention was over them."""
        subsets: Any
        if self._over_chosen(plan):
            return chosen_keys(plan.chosen, row_width), True
        paths = plan.paths(kv.device)
        spans = plan.keys.spans() if paths is None else paths.spans
        subsets = visible_keys(spans, kv.shape[1], kv.device)
        return subsets, plan.chosen is None

    def _over_chosen(self, plan: SparsePlan) -> bool:
        """Whether the loss is over the chosen keys alone."""
        return self.dsa.sparse_loss and plan.chosen is not None

    def _learns(self, *, only_indexer: bool) -> bool:
        """Whether this forward has a loss of the indexer.

        Raises:
            ValueError: If it should have one in a warm-up, and recomputation leaves it out.
        """
        if self.indexer is None or self.dsa.loss_coefficient == 0 or not self.training:
            return False
        # Where other weights are trained, such a forward may be one without gradients.
        frozen = only_indexer and self._is_trained() and not self.input_needs_gradient
        if frozen and is_never_recomputed():
            raise ValueError(
                f"the indexer of layer {self.layer_number} would get no gradient: all before it is "
                "frozen, and recomputation goes back only to layers whose input needs a gradient. "
                "Freeze with absorbed_mla.dsa.warm_up.train_only_indexer(model), or call "
                "require_embedding_gradient(model) from there; call model.eval() for a forward "
                "that trains nothing"
            )
        return torch.is_grad_enabled()

    def _is_trained(self) -> bool:
        assert self.indexer is not None
        return any(parameter.requires_grad for parameter in self.indexer.parameters())

    def _whole_indexer(self) -> SequenceParallelIndexer:
        assert self.indexer is not None
        return SequenceParallelIndexer(
            self.indexer, self._tp_group if self.sequence_parallel else None
        )

    def _selection_shape(
        self, plan: SparsePlan, request: SparseRequest, batch: int
    ) -> tuple[int, int, int] | None:
        """[S_q, B, topk]; None where nothing is chosen."""
        if self._backends.dense_serves(request, plan.layout.sequence_lengths):
            return None
        cp_size = 1 if plan.keys.group is None else plan.keys.group.size()
        return plan.layout.num_tokens // cp_size, batch, self.dsa.topk

    def _check_shape(self, chosen: Tensor | None, expected: tuple[int, int, int] | None) -> None:
        """Refuse a selection of other tokens, which a kernel would read out of bounds."""
        if chosen is not None and tuple(chosen.shape) != expected:
            wanted = "None" if expected is None else f"[S, B, topk] = {expected}"
            raise ValueError(
                f"a selection for layer {self.layer_number} must be {wanted}, "
                f"got {tuple(chosen.shape)}"
            )
