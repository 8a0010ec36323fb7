"""Names of the same weights in Megatron's ``GPTModel`` and ``HybridModel``.

Layer i of a GPTModel is two layers of a HybridModel, whose pattern alternates attention and MLP
(``+-+E``): attention is layer 2i and MLP layer 2i + 1, counted from 0. The norm behind the last
layer is ``final_layernorm`` in one and ``final_norm`` in the other. Megatron's own migration guide
has the same rule for ordinary attention. Tensors are the same.
"""

from __future__ import annotations

import re
from typing import Any

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from absorbed_mla.checkpoint.names import ATTENTION

# Megatron's branch dev had no symbol for MLA before KDA: there it is the attention layer, ``*``.
MLA_SYMBOL: str = getattr(Symbols, "MLA", Symbols.ATTENTION)
# Kimi Delta Attention, which releases up to 0.19.2 lack; the config's variant is "kda" with it.
KDA_SYMBOL: str | None = getattr(Symbols, "KDA", None)
# What of a GPTModel's layer goes into the first and into the second layer of a HybridModel.
_HALVES = (("input_layernorm.", ATTENTION), ("pre_mlp_layernorm.", "mlp."))
_LAYER = re.compile(r"(?P<block>(?:.*\.)?decoder\.layers\.)(?P<index>\d+)\.(?P<rest>.+)")
# GPTModel's MTP layer has the first name in distributed checkpoints, the second in state dicts.
_MTP_NAMES = ("transformer_layer", "mtp_model_layer")
_MTP = re.compile(
    rf"(?P<block>(?:.*\.)?mtp\.layers\.\d+\.)(?:{'|'.join(_MTP_NAMES)})\."
    r"(?:layers\.(?P<index>\d+)\.)?(?P<rest>.+)"
)
_FINAL_NORM = {"gpt": "decoder.final_layernorm.", "hybrid": "decoder.final_norm."}
_ALTERNATING = re.compile(rf"(?:{re.escape(MLA_SYMBOL)}[-E])+")


def to_hybrid_name(key: str) -> str:
    """A GPTModel's key as a HybridModel has it, in a state dict or a distributed checkpoint."""
    if found := _LAYER.fullmatch(key):
        index = 2 * int(found["index"]) + _half(found["rest"])
        return f"{found['block']}{index}.{found['rest']}"
    if found := _MTP.fullmatch(key):
        return f"{found['block']}{_MTP_NAMES[1]}.layers.{_half(found['rest'])}.{found['rest']}"
    return key.replace(_FINAL_NORM["gpt"], _FINAL_NORM["hybrid"])


def to_gpt_name(key: str, *, state_dict: bool = False) -> str:
    """A HybridModel's key as a GPTModel has it.

    Args:
        key: Of a model with alternating layers.
        state_dict: Whether it is for a state dict rather than a distributed checkpoint.
    """
    if found := _LAYER.fullmatch(key):
        return f"{found['block']}{int(found['index']) // 2}.{found['rest']}"
    if found := _MTP.fullmatch(key):
        return f"{found['block']}{_MTP_NAMES[state_dict]}.{found['rest']}"
    return key.replace(_FINAL_NORM["hybrid"], _FINAL_NORM["gpt"])


def to_hybrid_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A GPTModel's state dict under a HybridModel's names.

    Args:
        state_dict: Of a whole model, without pipeline parallelism.
    """
    return {to_hybrid_name(key): value for key, value in state_dict.items()}


def to_gpt_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A HybridModel's state dict under a GPTModel's names.

    Args:
        state_dict: Of a whole model with alternating layers, without pipeline parallelism.

    Raises:
        ValueError: If attention and MLP do not alternate, naming the layers.
    """
    halves: dict[str, dict[int, int]] = {}
    for key in state_dict:
        found = _LAYER.fullmatch(key) or _MTP.fullmatch(key)
        if found:
            halves.setdefault(found["block"], {})[int(found["index"] or 0)] = _half(found["rest"])
    for block, by_index in halves.items():
        found_halves = [half for _, half in sorted(by_index.items())]
        if found_halves != [0, 1] * (len(found_halves) // 2):
            raise ValueError(_no_twin(f"{block}{{{','.join(map(str, sorted(by_index)))}}}"))
    return {to_gpt_name(key, state_dict=True): value for key, value in state_dict.items()}


def require_alternating(pattern: str) -> None:
    """Refuse a model that is no GPTModel under other names.

    Raises:
        ValueError: Naming the ``hybrid_layer_pattern`` and what is accepted.
    """
    for part in pattern.replace("|", "").split("/"):
        if not _ALTERNATING.fullmatch(part):
            raise ValueError(_no_twin(f"layers of hybrid_layer_pattern={pattern!r}"))


def names_in(keys: Any) -> str | None:
    """Whose names these are, ``"gpt"`` or ``"hybrid"``; None without a final norm to tell by."""
    for names, norm in _FINAL_NORM.items():
        if any(key.startswith(norm) for key in keys):
            return names
    return None


def _half(rest: str) -> int:
    """Whether a name within a layer belongs to its attention (0) or its MLP (1)."""
    for half, starts in enumerate(_HALVES):
        if rest.startswith(starts):
            return half
    raise ValueError(f"{rest} is neither of a layer's attention nor of its MLP")


def _no_twin(layers: str) -> str:
    return (
        f"{layers} do not alternate MLA ({MLA_SYMBOL}) and MLP (- or E), so that no GPTModel has "
        "the weights"
    )
