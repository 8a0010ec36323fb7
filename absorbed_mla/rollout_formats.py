"""Routed experts and indexer selections as vLLM and SGLang return them, for training here."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from absorbed_mla.dsa.config import DSAConfig
from absorbed_mla.router_replay import expert_layers


def routed_experts_from_vllm(
    choice: Any, config: Any, *, prompt: Any = None, start: int = 0
) -> np.ndarray:
    """Routed experts of an output of vLLM, or of this package, for ``training_routed_experts``.

    Args:
        choice: A choice of the server's answer (``routed_experts`` is base64 of a ``.npy`` file),
            or the ``CompletionOutput`` of an ``LLM``.
        config: Of the model that trains.
        prompt: vLLM 0.21's ``prompt_routed_experts`` of the answer or ``RequestOutput``, whose
            choices have generated tokens only.
        start: ``routed_experts_prompt_start`` of the request: for so many tokens the router of the
            model that trains chooses.

    Returns:
        int32 [tokens, layers with experts, K]; -1 where nothing is known.

    Raises:
        ValueError: If there are none, or they are not those of such a model.
    """
    parts = [_array(_field(choice, "routed_experts", "vLLM"))]
    if prompt is not None:
        parts.insert(0, _array(prompt))
    return _of_expert_layers(np.concatenate(parts), config, start)


def routed_experts_from_sglang(answer: Any, config: Any, *, start: int = 0) -> np.ndarray:
    """Routed experts of an answer of SGLang, for ``training_routed_experts``.

    Args:
        answer: Of ``/generate`` (``meta_info``) or of its OpenAI routes (``sglext``).
        config: Of the model that trains.
        start: ``routed_experts_start_len`` of the request; as for vLLM.

    Returns:
        As :func:`routed_experts_from_vllm`.

    Raises:
        ValueError: Likewise.
    """
    shape = config.num_layers, config.moe_router_topk
    found = _of_all_layers(answer, "routed_experts", shape, "experts")
    return _of_expert_layers(found, config, start)


def indexer_topk_from_vllm(choice: Any, config: Any) -> np.ndarray:
    """Keys that sparse attention chose, of vLLM or this package, for ``RequestSelections.of``.

    Args:
        choice: As of :func:`routed_experts_from_vllm`, with ``indexer_topk``.
        config: Of the model that trains.

    Returns:
        int32 [tokens, layers with an indexer, topk], ascending, then -1.

    Raises:
        ValueError: If there are none, or they are not those of such a model.
    """
    return _of_indexed_layers(_array(_field(choice, "indexer_topk", "vLLM")), config)


def indexer_topk_from_sglang(answer: Any, config: Any) -> np.ndarray:
    """Keys that sparse attention chose, of an answer of SGLang (``meta_info``); as for vLLM.

    SGLang has a row for each layer, also of those that share another one's.
    """
    shape = config.num_layers, config.dsa_indexer_topk
    return _of_indexed_layers(_of_all_layers(answer, "indexer_topk", shape, "keys"), config)


def _of_indexed_layers(found: np.ndarray, config: Any) -> np.ndarray:
    """Without the rows of layers that share another one's, in this package's order of keys."""
    layers = DSAConfig.from_config(config).indexed_layers(config.num_layers)
    if found.ndim == 3 and found.shape[1] == config.num_layers:
        found = found[:, [number - 1 for number in layers]]
    if found.ndim != 3 or found.shape[1:] != (len(layers), config.dsa_indexer_topk):
        raise ValueError(
            f"indexer_topk must be [tokens, {len(layers)} layers with an indexer or "
            f"{config.num_layers} layers, {config.dsa_indexer_topk}], got {found.shape}"
        )
    last = np.iinfo(np.int32).max
    ordered = np.sort(np.where(found < 0, last, found).astype(np.int32), axis=-1)
    return np.where(ordered == last, -1, ordered)


def _of_expert_layers(found: np.ndarray, config: Any, start: int) -> np.ndarray:
    """Without the rows of dense layers, where there are some, and with those left out."""
    layers, topk = expert_layers(config), config.moe_router_topk
    if found.ndim == 3 and found.shape[1] == config.num_layers:
        found = found[:, [number - 1 for number in layers]]
    if found.ndim != 3 or found.shape[1:] != (len(layers), topk):
        raise ValueError(
            f"routed_experts must be [tokens, {len(layers)} layers with experts or "
            f"{config.num_layers} layers, {topk}], got {found.shape}"
        )
    if found.size and not -1 <= found.min() <= found.max() < config.num_moe_experts:
        raise ValueError(
            f"routed_experts must be below num_moe_experts {config.num_moe_experts}, got "
            f"{found.min()} to {found.max()}"
        )
    unknown = np.full((start, *found.shape[1:]), -1, np.int32)
    return np.concatenate((unknown, found.astype(np.int32)))


def _field(of: Any, name: str, engine: str) -> Any:
    found = of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)
    if found is None:
        flag = f"--enable-return-{name.replace('_', '-')}"
        raise ValueError(f"{engine}'s answer has no {name}: start its server with {flag}")
    return found


def _array(given: Any) -> np.ndarray:
    """A ``.npy`` file in base64, nested lists or an array."""
    if not isinstance(given, str):
        return np.asarray(given)
    try:
        return np.load(io.BytesIO(base64.b64decode(given, validate=True)), allow_pickle=False)
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f"no .npy file in base64: {error}") from error


def _of_all_layers(
    answer: Mapping[str, Any], name: str, shape: tuple[int, int], what: str
) -> np.ndarray:
    """An array [tokens, layers, width] of SGLang's answer; ``shape`` is that of one token."""
    # Where SGLang has what OpenAI's answers lack.
    meta = answer.get("meta_info") or answer.get("sglext") or {}
    given = _field(meta, name, "SGLang")
    try:
        numbers = np.frombuffer(base64.b64decode(given, validate=True), "<i4")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no int32 in base64: {error}") from error
    layers, width = shape
    if len(numbers) % (layers * width):
        raise ValueError(
            f"{name} must have {layers} layers x {width} {what} for each token, got "
            f"{len(numbers)} numbers"
        )
    return numbers.reshape(-1, *shape)
