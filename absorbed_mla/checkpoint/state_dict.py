"""State dicts of one tensor-parallel rank, from every layout that Megatron's MLA writes, and back.

The layouts are declared in ``layouts/``. This package's own has K and V up-projections split and
everything else separate. Only values move; no tensor is rounded or transposed, so both directions
are exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from absorbed_mla.checkpoint.layout import LayoutChange, MegatronLayout
from absorbed_mla.checkpoint.names import (
    ATTENTION,
    EXTRA_STATE,
    INPUT_NORM,
    INPUT_NORM_FUSED,
    K_UP,
    KV_DOWN,
    KV_UP,
    Q_DOWN,
    QKV_DOWN,
    V_UP,
)
from absorbed_mla.dims import MLADims
from absorbed_mla.registry import CHECKPOINT_LAYOUTS


def to_absorbed_state_dict(
    state_dict: dict, dims: MLADims, prefix: str | None = None, *, down: str = "separate"
) -> dict:
    """Bring the MLA layers of a state dict into this package's layout.

    Args:
        state_dict: Of an attention, a layer or a whole model, in any layout of ``layouts/``.
        dims: Dimensions on the rank that the state dict belongs to.
        prefix: Of one attention, e.g. ``"decoder.layers.0.self_attention."``; None finds them all.
        down: ``"separate"``, or ``"fused"`` as a model with ``mla_down_proj_fusion`` has them.

    Returns:
        A new dict; tensors are shared where they did not change.

    Raises:
        ValueError: If a tensor has an unexpected shape or is there in two layouts, naming keys,
            shapes and layout, or ``down`` is neither.
    """
    layout = MegatronLayout(kv_up="split", down=down)
    result = dict(state_dict)
    stacks = [stack for one in CHECKPOINT_LAYOUTS for stack in (*one.joined, *one.split)]
    parts = [part for one in CHECKPOINT_LAYOUTS for stack in one.split for part in stack.parts]
    others = {name for stack in stacks for name in (stack.whole, *stack.parts)}
    others.add(f"{ATTENTION}core_attention.")
    for start in find_attentions(state_dict) if prefix is None else [prefix]:
        _change_layout(result, dims, start, layout)
        for name in others:
            # Layers that this package does not have, or that keep none.
            if name in parts or _key(name, start) not in result:
                result.pop(_extra_state(_key(name, start)), None)
    return result


def to_standard_state_dict(
    state_dict: dict,
    dims: MLADims,
    *,
    norms: str = "separate",
    down: str = "separate",
    prefix: str | None = None,
    **others: str,
) -> dict:
    """Write the MLA layers of a state dict in one of Megatron's standard layouts.

    Args:
        state_dict: In this package's layout.
        dims: Dimensions on the rank that the state dict belongs to.
        norms: ``"separate"`` (local spec) or ``"fused"`` (TransformerEngine's).
        down: ``"separate"`` or ``"fused"`` (``mla_down_proj_fusion``).
        prefix: Of one attention; None finds them all.
        others: Options of further layouts of ``layouts/``, by name.

    Raises:
        ValueError: If an option is unknown or the model cannot have it, or a tensor is missing or
            has an unexpected shape.
    """
    layout = MegatronLayout(norms=norms, down=down, **others)
    for one in CHECKPOINT_LAYOUTS:
        why_not = one.why_not(dims) if layout.includes(one) else None
        if why_not is not None:
            raise ValueError(f"{one.option}={one.value!r} {why_not}")
    result = dict(state_dict)
    for start in find_attentions(state_dict) if prefix is None else [prefix]:
        for name in (K_UP, V_UP):
            if _key(name, start) not in result:
                raise ValueError(f"{_key(name, start)} is missing from the state dict")
        before = set(result)
        _change_layout(result, dims, start, layout)
        for key in before - set(result):
            result.pop(_extra_state(key), None)
        for name in (KV_UP, Q_DOWN, KV_DOWN, QKV_DOWN):
            if _key(name, start) in result.keys() - before:
                result[_extra_state(_key(name, start))] = None
    return result


def find_attentions(keys: Iterable[str]) -> list[str]:
    """Prefixes of the MLA layers among the keys of a state dict."""
    marks = [name.removeprefix(ATTENTION) for name in (KV_DOWN, QKV_DOWN)]
    return sorted({key.removesuffix(m) for key in keys for m in marks if key.endswith(m)})


def input_norm_error(prefix: str) -> ValueError:
    """What to say where only the enclosing layer could take the norm that is fused in."""
    return ValueError(
        f"{_key(INPUT_NORM_FUSED, prefix)} is the enclosing layer's {INPUT_NORM}, which an "
        "attention cannot load: convert the state dict of the layer or model with "
        "to_absorbed_state_dict first"
    )


def recognise_layout(names: Iterable[str]) -> MegatronLayout:
    """Recognise the layout of an attention from its keys, without prefix."""
    return MegatronLayout.recognise(ATTENTION + name for name in names)


def _change_layout(state: dict, dims: MLADims, prefix: str, layout: MegatronLayout) -> None:
    """Change one attention's layout in place."""
    names = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    recognised = recognise_layout(names)
    weights = {ATTENTION + name: state[prefix + name] for name in names}
    change: LayoutChange = LayoutChange(
        layout,
        dims,
        dims.num_heads_per_rank,
        lambda tensors, dim: torch.cat(list(tensors), dim),
        torch.reshape,
        sharded=True,
    )
    changed = change.apply(weights, lambda name: _key(name, prefix))
    if change.problems:
        raise ValueError(f"{'; '.join(change.problems)} (recognised layout: {recognised})")
    if INPUT_NORM in changed and not prefix.endswith(ATTENTION):
        raise input_norm_error(prefix)
    for name in weights.keys() - changed.keys():
        del state[_key(name, prefix)]
    state.update({_key(name, prefix): weight for name, weight in changed.items()})


def _key(name: str, prefix: str) -> str:
    """The key in a state dict of a name relative to the layer, whose attention has ``prefix``."""
    if name.startswith(ATTENTION):
        return prefix + name.removeprefix(ATTENTION)
    return prefix.removesuffix(ATTENTION) + name


def _extra_state(key: str) -> str:
    """The key of the extra state of the module that has the weight ``key``."""
    return key.rpartition(".")[0] + EXTRA_STATE
