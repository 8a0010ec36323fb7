"""Record and replay of the selections of a model's forwards.

Reinforcement learning samples with one set of weights or kernels and trains with another. With the
keys that were chosen while sampling, both are probabilities of the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from absorbed_mla.dsa.core_attention import SparseCoreAttention
from absorbed_mla.dsa.index_sharing import Selected

# By the name of a layer's core attention in the model: its selection in every forward. int32
# [S_q, B, topk], or None where every query had all keys that it sees. Of a forward with an
# inference context [T, topk]: for its new tokens, one request after the other, then the host's
# padding, the positions in the token's request.
Selections = dict[str, list[Tensor | None]]


@contextmanager
def record_selections(model: nn.Module | Sequence[nn.Module]) -> Iterator[Selections]:
    """Record what is chosen in every forward inside of the ``with`` block.

    A selection has the queries of this context-parallel rank, and indices on the axis of the keys
    of all ranks; it is equal on all tensor-parallel ranks. Recomputation in backward is no forward.
    A forward of generation is one; its selections cannot be replayed as they are, for those of an
    engine's requests see ``RequestSelections``.

    Args:
        model: Or its chunks, under a virtual pipeline. Its layers that have an indexer are
            recorded; those that share a selection follow them.

    Raises:
        ValueError: If the model has no such layer, or its steps may be in CUDA graphs.
    """
    layers = recordable_layers(model)
    found: Selections = {name: [] for name in layers}
    for name, layer in layers.items():
        kept = found[name]
        layer.selection.recorder = lambda selected, kept=kept: kept.append(selected.chosen)
    try:
        yield found
    finally:
        for layer in layers.values():
            layer.selection.recorder = None


@contextmanager
def replay_selections(
    model: nn.Module | Sequence[nn.Module], selections: Selections
) -> Iterator[None]:
    """Use recorded selections in the forwards inside of the ``with`` block, in their order.

    The forwards must be those of the recording: the same sequences in the same layout, cut over the
    same ranks. Backward may follow after the block.

    Args:
        model: As in :func:`record_selections`.
        selections: From there, or from ``training_selections``; on any device.

    Raises:
        ValueError: If layers or shapes do not fit, or the model is called more often.
    """
    layers = selecting_layers(model)
    # Those of requests have no layers of multi-token prediction, which then choose by themselves.
    layers = {n: one for n, one in layers.items() if n in selections or not one.is_mtp_layer}
    if layers.keys() != selections.keys():
        raise ValueError(
            f"selections are of layers {sorted(selections)}, this model has {sorted(layers)}"
        )
    for name, layer in layers.items():
        layer.selection.replayed = iter([Selected(one) for one in selections[name]])
    try:
        yield
    finally:
        for layer in layers.values():
            layer.selection.replayed = None


def recordable_layers(model: nn.Module | Sequence[nn.Module]) -> dict[str, SparseCoreAttention]:
    """:func:`selecting_layers` of a model whose steps run this package's code.

    Raises:
        ValueError: As :func:`record_selections`.
    """
    layers = selecting_layers(model)
    graphs = next(iter(layers.values())).graph_impl
    if graphs != "none":
        raise ValueError(
            f"recording selections needs cuda_graph_impl='none', got {graphs!r}: a replayed graph "
            "runs no code that could record"
        )
    return layers


def selecting_layers(model: nn.Module | Sequence[nn.Module]) -> dict[str, SparseCoreAttention]:
    """The core attentions with an indexer, by name in the model or its chunks.

    Raises:
        ValueError: If there is none.
    """
    chunks = (
        {"": model} if isinstance(model, nn.Module) else {f"{i}.": m for i, m in enumerate(model)}
    )
    layers = {
        prefix + name: module
        for prefix, chunk in chunks.items()
        for name, module in chunk.named_modules()
        if isinstance(module, SparseCoreAttention) and module.indexer is not None
    }
    if not layers:
        raise ValueError(
            "the model has no layer with an indexer (experimental_attention_variant='dsa')"
        )
    return layers
