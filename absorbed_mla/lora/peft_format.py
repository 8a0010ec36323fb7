"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Hugging Face's ``kv_b_proj`` has the rows of our K-up and V-up, head by head. An adapter of it is
one of each, with the same A. Where training has made their A differ, both are written as one of
the sum of their ranks, which computes the same: ::

    A = [A_k; A_v]    B = [B_k 0] in the rows of K, [0 B_v] in those of V
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.dims import MLADims
from absorbed_mla.lora.adapter import layers_of, lora_of
from absorbed_mla.lora.model import Model, attentions, is_one_of_several_stages, put_on
from absorbed_mla.lora.request import CONFIG, WEIGHTS
from absorbed_mla.lora.targets import KV_B, TARGETS
from absorbed_mla.own_packages import require_own_packages

require_own_packages("checkpoint_conversion")

from checkpoint_conversion.checkpoint_folder import MAX_CONFIG_BYTES, read_json  # noqa: E402
from checkpoint_conversion.config_fields import Fields  # noqa: E402
from checkpoint_conversion.errors import raise_problems  # noqa: E402
from checkpoint_conversion.formats.safetensors_file import (  # noqa: E402
    read_header,
    write_tensors,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession  # noqa: E402

_NAME = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"
_NAMED = re.compile(
    r"base_model\.model\.(?:\w+\.)*layers\.(\d+)\.self_attn\.(\w+)\.lora_([AB])\.weight"
)
# Fields that say that the adapter is more than two matrices for a layer.
_MUST_BE_UNSET = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "layer_replication", "trainable_token_indices"),
    *("modules_to_save", "target_parameters", "alora_invocation_tokens", "use_qalora"),
    *("use_bdlora", "kasa_config", "velora_config", "monteclora_config", "arrow_config"),
)
# Others change the base's weights, too.
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
_MOST = 2**31


@dataclass(frozen=True)
class Update:
    """LoRA of one layer, whole: the layer's weight gets ``scaling b a``."""

    a: Tensor
    b: Tensor
    scaling: float


# By number of the layer, from 0, and Megatron's name of the linear layer.
Updates = dict[tuple[int, str], Update]


def load_peft_adapter(model: Model, folder: str | Path) -> None:
    """Put an adapter in PEFT's format on a model; what :func:`add_lora` says holds here, too.

    Args:
        model: This rank's part of it, or its model chunks, without LoRA.
        folder: Has adapter_config.json and adapter_model.safetensors.

    Raises:
        ValueError: If the folder cannot be read, or has what is no LoRA of this model's attention.
    """
    chosen = list(attentions(model))
    if not chosen and not is_one_of_several_stages(model):
        raise ValueError("the model has no AbsorbedMLASelfAttention that an adapter could be for")
    updates = read_peft_adapter(folder, chosen[0]) if chosen else {}
    put_on(
        model,
        lambda attention: {
            name: (len(updates[key].a), updates[key].scaling)
            for name in layers_of(attention)
            if (key := (attention.layer_number - 1, name)) in updates
        },
    )
    for attention in chosen:
        for name, one in (lora_of(attention) or {}).items():
            update = updates[attention.layer_number - 1, name]
            for factor, whole in (("lora_A", update.a), ("lora_B", update.b)):
                own = one.sharding.own_part(whole, factor)
                with torch.no_grad():
                    getattr(one, factor).weight.copy_(own)


def read_peft_adapter(folder: str | Path, attention: AbsorbedMLASelfAttention) -> Updates:
    """The whole matrices of an adapter for a model whose attentions are like ``attention``.

    Raises:
        ValueError: As :func:`load_peft_adapter`, with all problems.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no adapter in PEFT's format: it has no {name}")
    problems: list[str] = []
    fields = Fields(read_json(folder / CONFIG, MAX_CONFIG_BYTES), problems)
    scaling = _Scaling(fields)
    found: dict[tuple[int, str], dict[str, LazyTensor]] = {}
    for name, tensor in read_header(folder / WEIGHTS).items():
        match = _NAMED.fullmatch(name)
        if match is None:
            problems.append(f"{name} is no LoRA of an attention's linear layer")
        else:
            found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    _require_pairs(attention)
    shapes = _shapes(attention)
    for (layer, theirs), pair in found.items():
        name = f"layers.{layer}.self_attn.{theirs}"
        if theirs not in shapes or layer >= attention.config.num_layers:
            problems.append(f"the model has no {name}")
            continue
        rank = scaling.rank(name)
        outputs, inputs = shapes[theirs]
        for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            stored = pair.get(factor)
            got = None if stored is None else tuple(stored.shape)
            if got != shape:
                problems.append(f"{name}.lora_{factor} must be {list(shape)}, got {got}")
            elif not stored.dtype.is_floating_point:
                problems.append(f"{name}.lora_{factor} must be floating, got {stored.dtype}")
    if not found:
        problems.append("it has no tensors")
    raise_problems(f"{folder} cannot be loaded:", problems)
    updates: Updates = {}
    with ReadSession() as session:
        for (layer, theirs), pair in sorted(found.items()):
            a, b = (pair[factor].load(session).clone() for factor in "AB")
            times = scaling.of(f"layers.{layer}.self_attn.{theirs}")
            for ours, rows in _of_ours(theirs, b, attention.dims):
                updates[layer, ours] = Update(a, rows, times)
    return updates


def _require_pairs(attention: AbsorbedMLASelfAttention) -> None:
    if attention.options.rope_factors is not None:
        raise ValueError(
            "adapters in PEFT's format need rope_factors=None: the rotary channels of MiniCPM3's "
            f"are in another order than the layer's; got {attention.options.rope_factors}"
        )


class _Scaling:
    """Rank and factor of every layer, by an adapter_config.json."""

    def __init__(self, fields: Fields) -> None:
        fields.only("peft_type", "LORA")
        fields.only("bias", "none")
        for name in _MUST_BE_UNSET:
            if fields.raw(name):
                fields.wrong(name, "unset")
        if fields.given("init_lora_weights") and fields.raw("init_lora_weights") not in _INITIAL:
            fields.wrong("init_lora_weights", f"one of {_INITIAL}: others change the base, too")
        self._rank = fields.integer("r", _MOST)
        self._alpha = fields.number("lora_alpha", 1e-9, 1e9)
        self._root = fields.boolean("use_rslora", False)
        self._ranks, self._alphas = (_pattern(fields, n) for n in ("rank_pattern", "alpha_pattern"))

    def rank(self, name: str) -> int:
        return int(_matched(self._ranks, name, self._rank))

    def of(self, name: str) -> float:
        rank = self.rank(name)
        return _matched(self._alphas, name, self._alpha) / (rank**0.5 if self._root else rank)


def _pattern(fields: Fields, name: str) -> Mapping[str, float]:
    """A field that has values for layers by the ends of their names."""
    value = fields.raw(name) or {}
    plain = isinstance(value, dict) and all(
        re.fullmatch(r"\^?[\w.]+", key) and type(number) in (int, float) and number > 0
        for key, number in value.items()
    )
    if not plain:
        fields.wrong(name, "numbers above 0 by names of layers, or ends of them")
    return {key.removeprefix("^"): number for key, number in value.items()} if plain else {}


def _matched(pattern: Mapping[str, float], name: str, default: float) -> float:
    """PEFT's choice: the first pattern that ends the name, which begins with ``model.`` there."""
    full = f".model.{name}"
    return next((value for key, value in pattern.items() if full.endswith(f".{key}")), default)


def _shapes(attention: AbsorbedMLASelfAttention) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the layers that Hugging Face's model has."""
    dims = attention.dims
    heads, hidden = dims.num_heads, dims.hidden_size
    queries = heads * dims.qk_head_dim
    shapes = {
        KV_B: (heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank),
        "kv_a_proj_with_mqa": (dims.kv_down_dim, hidden),
        "o_proj": (hidden, heads * dims.v_head_dim),
    }
    if dims.q_lora_rank is None:
        return shapes | {"q_proj": (queries, hidden)}
    return shapes | {
        "q_a_proj": (dims.q_lora_rank, hidden),
        "q_b_proj": (queries, dims.q_lora_rank),
    }


def _of_ours(theirs: str, b: Tensor, dims: MLADims) -> Iterator[tuple[str, Tensor]]:
    """Our layers of one of Hugging Face's, with their rows."""
    names = [ours for ours, name in TARGETS.items() if name == theirs]
    if theirs != KV_B:
        yield names[0], b
        return
    by_head = b.unflatten(0, (dims.num_heads, -1))
    parts = by_head.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=1)
    yield from zip(names, (part.flatten(0, 1) for part in parts), strict=True)


def save_peft_adapter(model: Model, folder: str | Path, base_model: str | None = None) -> None:
    """Write a model's LoRA in PEFT's format; collective over the ranks that hold the model.

    Args:
        model: This rank's part of it, or its model chunks.
        folder: Made if it is not there; files of the two names in it are replaced.
        base_model: ``base_model_name_or_path`` of adapter_config.json.

    Raises:
        ValueError: If the model has no LoRA.
        OSError: On every rank, if rank 0 cannot write it.
    """
    own = {key: update for attention in attentions(model) for key, update in _whole(attention)}
    # A stage may have no attention.
    dims = [attention.dims for attention in attentions(model)][:1]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list = [(own, dims)]
    if group.size() > 1:
        stages *= group.size()
        dist.all_gather_object(stages, (own, dims), group=group)
    updates: Updates = {key: update for stage, _ in stages for key, update in stage.items()}
    if not updates:
        raise ValueError("the model has no LoRA: add_lora first")
    failure: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            [dims, *_] = [one for _, some in stages for one in some]
            write_peft_adapter(updates, dims, folder, base_model)
        except Exception as error:
            failure = [error]
    dist.broadcast_object_list(failure, 0)
    if failure[0] is not None:
        raise failure[0]


@torch.no_grad()
def _whole(attention: AbsorbedMLASelfAttention) -> Iterator[tuple[tuple[int, str], Update]]:
    _require_pairs(attention)
    for name, one in (lora_of(attention) or {}).items():
        a, b = (
            one.sharding.whole(getattr(one, factor).weight.detach(), factor).cpu()
            for factor in ("lora_A", "lora_B")
        )
        yield (attention.layer_number - 1, name), Update(a, b, one.scaling)


def write_peft_adapter(
    updates: Updates, dims: MLADims, folder: str | Path, base_model: str | None = None
) -> None:
    """Write both files, on one rank."""
    theirs: dict[tuple[int, str], Update] = {}
    for layer, name in updates:
        theirs[layer, TARGETS[name]] = updates[layer, name]
    for layer in {layer for layer, name in theirs if name == KV_B}:
        halves = [updates.get((layer, name)) for name, hf in TARGETS.items() if hf == KV_B]
        theirs[layer, KV_B] = _joined(*halves, dims)
    tensors = {
        _NAME.format(layer, name, factor): tensor.clone().contiguous()
        for (layer, name), update in sorted(theirs.items())
        for factor, tensor in (("A", update.a), ("B", update.b))
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / WEIGHTS)
    text = json.dumps(_config(theirs, base_model), indent=2)
    (folder / CONFIG).write_text(f"{text}\n", encoding="utf-8")


def _joined(k: Update | None, v: Update | None, dims: MLADims) -> Update:
    """LoRA of ``kv_b_proj`` that does what those of K-up and V-up do."""
    widths = dims.qk_nope_head_dim, dims.v_head_dim
    some = k or v
    assert some is not None, "kv_b_proj has LoRA"
    halves = [
        one or Update(some.a[:0], some.b.new_zeros(dims.num_heads * width, 0), some.scaling)
        for one, width in zip((k, v), widths)
    ]
    assert halves[0].scaling == halves[1].scaling, "one config made both"
    by_head = [one.b.unflatten(0, (dims.num_heads, -1)) for one in halves]
    (k, v), (b_k, b_v) = halves, by_head
    if torch.equal(k.a, v.a):
        return Update(k.a, torch.cat(by_head, 1).flatten(0, 1), k.scaling)
    pad = torch.nn.functional.pad
    rows = pad(b_k, (0, len(v.a))), pad(b_v, (len(k.a), 0))
    return Update(torch.cat((k.a, v.a)), torch.cat(rows, 1).flatten(0, 1), k.scaling)


def _config(theirs: Mapping[tuple[int, str], Update], base_model: str | None) -> dict[str, object]:
    """What PEFT needs of adapter_config.json; ranks of some layers are in its patterns."""
    alphas = {key: (len(one.a), _plain(one.scaling * len(one.a))) for key, one in theirs.items()}
    pairs = [*alphas.values()]
    rank, alpha = usual = max(pairs, key=pairs.count)
    of_name: dict[str, set] = {}
    for (_, name), pair in alphas.items():
        of_name.setdefault(name, set()).add(pair)
    others = {
        name if len(of_name[name]) == 1 else f"model.layers.{layer}.self_attn.{name}": pair
        for (layer, name), pair in alphas.items()
        if pair != usual
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name for _, name in theirs}),
        "layers_to_transform": sorted({layer for layer, _ in theirs}),
        "rank_pattern": {name: rank for name, (rank, _) in others.items()},
        "alpha_pattern": {name: alpha for name, (_, alpha) in others.items()},
    }


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number
