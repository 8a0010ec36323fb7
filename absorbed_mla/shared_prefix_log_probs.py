"""Log-probabilities of sequences in a pack where prefixes that they share stand once.

The last token of a prompt has as many next tokens as the prompt has answers, so no row of labels
fits such a pack. :func:`shared_prefix_log_probs` runs Megatron's model, gives the output layer the
hidden state of a token once for each of its labels, and returns what the pack without shared
prefixes gives; gradients of what is shared add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.batch_invariant.mode import is_enabled
from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.context_parallel.strategy import group_of_call
from absorbed_mla.packed_roll import require_tree_roll
from absorbed_mla.packed_router import counted_tokens
from absorbed_mla.prefix_tree import PrefixTree
from absorbed_mla.sequences import SequenceLayout


def shared_prefix_log_probs(
    model: nn.Module,
    tree: PrefixTree,
    token_ids: Tensor,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """Log-probabilities of labels, as the pack without shared prefixes has them, differentiable.

    Losses that balance experts, the experts' bias and MTP's losses count a token as often as that
    pack has it. For MTP the last tokens of a prefix stand once for each of its continuations. The
    pack is padded to what sequence and context parallelism need.

    Args:
        model: Megatron's ``GPTModel``, also inside of wrappers, or a pipeline stage of it.
        tree: Of the whole pack.
        token_ids: int64 [S], of the tree's tokens in their order.
        labels: int64 [U], of each token of the pack without shared prefixes (``tree.expand()``),
            for example the next one of its sequence; negative: none. None: the next one.
        loss_mask: [U], weights of MTP's losses, as ``GPTModel.forward`` has them without labels;
            None: 1.

    Returns:
        fp32 [U], 0 where there is no label; on every tensor- and context-parallel rank. In parity
        mode to the bit what Megatron's engine has, and fp64 for fp64 logits. Gradients of
        context-parallel ranks add up to those of a loss that each of them computes as a whole;
        those of MTP's mean losses to ranks times these, unless ``calculate_per_token_loss``.
        From pipeline stages before the last: hidden states.

    Raises:
        ValueError: If the model does what cannot be the same with shared prefixes, naming the field
            of its config, or shapes do not fit.
    """
    _require_shared_prefixes(model)
    group = group_of_call(None, parallel_state.get_context_parallel_group(check_initialized=False))
    given = tree.expand().to(token_ids.device)
    if labels is None:
        labels = _next_tokens(tree, token_ids[given])
    if loss_mask is None:
        loss_mask = torch.ones(len(given), device=given.device)
    for name, values, count in (
        ("token_ids", token_ids, tree.num_tokens),
        ("labels", labels, len(given)),
        ("loss_mask", loss_mask, len(given)),
    ):
        if values.shape != (count,):
            raise ValueError(f"{name} must have a shape of ({count},), got {tuple(values.shape)}")
    tree = _laid_out(tree, get_model_config(model), 1 if group is None else group.size())
    params, expand = tree.packed_seq_params(given.device), tree.expand().to(given.device)
    pairs = _Pairs.of(expand, labels.to(given.device))
    own = torch.arange(tree.num_tokens, device=given.device)
    if group is not None:
        layout = SequenceLayout.from_host(params, tree.num_tokens)
        cut = ContextParallelLayout.of(layout, group.size(), group.rank())
        own = cut.index("tokens", given.device)
    places = torch.full((tree.num_tokens,), -1, device=given.device)
    places[own] = torch.arange(len(own), device=given.device)
    rows = places[pairs.rows]
    here = (rows >= 0).nonzero()[:, 0]
    ids = torch.zeros_like(places).index_copy(0, expand, token_ids[given])
    weights = loss_mask.new_zeros(tree.num_tokens).index_add(0, expand, loss_mask)
    with counted_tokens(model, expand.bincount(minlength=tree.num_tokens)[own]):
        found = model(
            ids[own][None],
            tree.position_ids().to(given.device)[own][None],
            None,
            loss_mask=weights[own][None],
            packed_seq_params=params,
            output_processor=_log_probs,
            output_processor_context=_Rows(rows[here], pairs.labels[here]),
        )
    if not get_attr_wrapped_model(model, "post_process"):
        return found
    whole = found.new_zeros(len(rows)).index_copy(0, here, found)
    if group is not None:
        whole = reduce_from_tensor_model_parallel_region(whole, group=group)
    return whole.new_zeros(len(expand)).index_copy(0, pairs.places, whole[pairs.inverse])


def _require_shared_prefixes(model: nn.Module) -> None:
    """Refuse layers that do not know the tree; those that do refuse what they cannot do with it."""
    for layer in get_attr_wrapped_model(model, "decoder").layers:
        mixer = getattr(layer, "self_attention", layer)
        if not isinstance(mixer, AbsorbedMLASelfAttention):
            raise ValueError(
                "shared prefixes need AbsorbedMLASelfAttention in every layer, got "
                f"{type(mixer).__name__}, which takes the nodes of a tree for whole sequences"
            )
    if get_model_config(model).mtp_num_layers:
        require_tree_roll()


def _laid_out(tree: PrefixTree, config: TransformerConfig, cp_size: int) -> PrefixTree:
    """The tree with nodes, and the pack, of as many tokens as parallelism and MTP need.

    The sequences are the same. For D depths of MTP the last 1 + D tokens of a node stand in the
    nodes below it: they predict tokens that differ there, or see such.
    """
    moved = 1 + config.mtp_num_layers if config.mtp_num_layers else 0
    above = [0 if parent is None else moved for parent in tree.parents]
    inner = {*tree.parents} - {None}
    lengths = [
        length + more - (moved if node in inner else 0)
        for node, (length, more) in enumerate(zip(tree.lengths, above))
    ]
    if moved and (inner & {*tree.ends} or any(lengths[node] < 1 for node in inner)):
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} needs prefixes of {moved + 1} tokens or more, "
            f"and sequences that end behind them; got nodes of {list(tree.lengths)} tokens with "
            f"parents {list(tree.parents)} and ends {list(tree.ends)}"
        )
    chunk = 2 * cp_size if cp_size > 1 else 1
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    padding = (padded - length for padded, length in zip(tree.padded_lengths, tree.lengths))
    slots = [-(-(length + more) // chunk) * chunk for length, more in zip(lengths, padding)]
    slots[-1] += -sum(slots) % (chunk * ranks)
    return replace(tree, lengths=lengths, padded_lengths=slots)


def _next_tokens(tree: PrefixTree, tokens: Tensor) -> Tensor:
    """Of every token of the pack without shared prefixes the next of its sequence, or -1."""
    found = tokens.roll(-1)
    found[torch.tensor(tree.sequence_lengths).cumsum(0) - 1] = -1
    return found


class _Rows(NamedTuple):
    """Hidden states that a rank multiplies by the output layer, int64, and the label of each."""

    rows: Tensor
    labels: Tensor


class _Pairs(NamedTuple):
    """Tokens of a pack with shared prefixes and labels of theirs, no pair twice.

    Attributes:
        rows: The tokens, int64 [P], in ascending order.
        labels: int64 [P].
        places: Tokens of the pack without shared prefixes that have a label, int64 [N].
        inverse: The pair of each, int64 [N].
    """

    rows: Tensor
    labels: Tensor
    places: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, expand: Tensor, labels: Tensor) -> _Pairs:
        places = (labels >= 0).nonzero()[:, 0]
        given = torch.stack([expand[places], labels[places]])
        pairs, inverse = given.unique(dim=1, return_inverse=True)
        return cls(*pairs, places, inverse)


def _log_probs(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    compute_language_model_loss: Any,
    scale_logits: Any,
    config: TransformerConfig,
    context: _Rows,
    **_others: Any,
) -> Tensor:
    """fp32 [P], of the labels; what ``GPTModel`` calls in place of its output layer and loss."""
    rows, labels = context
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    # At least one row each, and equally many.
    missing = -len(rows) % ranks if len(rows) else ranks
    rows, padded = (F.pad(one, (0, missing)) for one in (rows, labels))
    if ranks > 1:
        group = output_layer.tp_group
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=group
        )
    chosen = hidden_states[rows]
    if ranks > 1:
        chosen = scatter_to_sequence_parallel_region(chosen, group=group)
    logits, _ = output_layer(chosen, weight=output_weight, runtime_gather_output=False)
    logits = scale_logits(logits)
    if is_enabled(logits.device):
        # By row over the whole vocabulary, as Megatron's engine has them.
        whole = gather_from_tensor_model_parallel_region(logits, group=output_layer.tp_group)
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32)).log_softmax(-1)
        return whole[: len(labels), 0].gather(-1, labels[:, None])[:, 0]
    losses = compute_language_model_loss(padded[None], logits)
    return -losses[0, : len(labels)]
