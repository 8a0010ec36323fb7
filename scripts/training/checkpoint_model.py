"""Compare the model and the run of a checkpoint with the command line, before a model is built."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping

from megatron.core import dist_checkpointing

from console.ranks import rank
from training.arguments import model_of
from training.checkpoint import Start
from training.checkpoint_args import model_from_args
from training.options import flag_of
from training.presets import COMMON, INDEXER, Model

# Arguments that determine the shapes of weights.
_SHAPES = {
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_router_enable_expert_bias"),
    *("experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim"),
    *("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"),
}
_VARIANT = flag_of("experimental_attention_variant")
# Arguments besides the model's that must not change when a run is resumed.
_RUN = (
    *("attention", "seed", "seq_length", "global_batch_size", "packed", "split_percent"),
    *("train_only", "lora_rank", "lora_alpha", "lora_target_modules", "data_fingerprint"),
)
_NAMES = {"split_percent": "--split", "data_fingerprint": "the data (--data, --tokenizer)"}
# Arguments that the weights do not depend on and that may be chosen freely.
_FREE = {"max_position_embeddings", "moe_aux_loss_coeff"}
_YARN = {
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
}
# The values that Megatron uses where a field is None.
_DEFAULTS = {"moe_router_topk_scaling_factor": 1.0}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_HEADS = "--num-attention-heads"
_KEYS = f"{_HEADS} x (--qk-head-dim + --qk-pos-emb-head-dim)"
_VALUES = f"{_HEADS} x (--qk-head-dim + --v-head-dim)"
_LATENT = "--kv-lora-rank + --qk-pos-emb-head-dim"
_OUTPUT = f"{_HEADS} x --v-head-dim"
_SHARED_EXPERTS = "--moe-shared-expert-intermediate-size"
_UNCOMPRESSED_QUERY = "self_attention.linear_q_proj.weight"
_ROUTER = "mlp.router.weight"
_INDEXER = "self_attention.core_attention.indexer.linear_wq_b.weight"
# Tensor, dimension, what its size is a multiple of, option. An MLP's first tensor holds the gate
# and the up-projection.
_SIZES_OF_TENSORS = (
    ("embedding.word_embeddings.weight", 0, 1, "the vocabulary"),
    ("embedding.word_embeddings.weight", 1, 1, "--hidden-size"),
    (_UNCOMPRESSED_QUERY, 0, 1, _KEYS),
    ("self_attention.linear_q_up_proj.weight", 0, 1, _KEYS),
    ("self_attention.linear_q_up_proj.weight", 1, 1, "--q-lora-rank"),
    ("self_attention.linear_kv_up_proj.weight", 0, 1, _VALUES),
    ("self_attention.linear_kv_up_proj.weight", 1, 1, "--kv-lora-rank"),
    ("self_attention.linear_kv_down_proj.weight", 0, 1, _LATENT),
    ("self_attention.linear_proj.weight", 1, 1, _OUTPUT),
    (_ROUTER, 0, 1, "--num-experts"),
    ("mlp.linear_fc1.weight", 0, 2, "--ffn-hidden-size"),
    ("mlp.shared_experts.linear_fc1.weight", 0, 2, _SHARED_EXPERTS),
)


def require_same_model(args: argparse.Namespace, start: Start, script: str) -> None:
    """Refuse a checkpoint whose weights have other shapes than those of the command line's model.

    The checkpoint's model is read from its arguments or, without them, from the shapes of its
    tensors. Options that change what the same weights compute, such as the rotary base, may be
    intended: rank 0 prints a warning.

    Args:
        args: The command line, with the vocabulary set.
        start: The checkpoint.
        script: Name of the program, for the warning.

    Raises:
        ValueError: Naming all sizes that differ, in one line.
    """
    if args.use_checkpoint_args:
        return
    model = model_of(args)
    if args.new_indexer:
        # The checkpoint must hold what is left of the model without its indexer.
        model |= {name: COMMON[name] for name in INDEXER}
    there = _described(start)
    if there is None:
        saved = dist_checkpointing.load_tensors_metadata(str(start.path))
        shapes = {name: tuple(tensor.global_shape) for name, tensor in saved.items()}
        problems, warnings = _differences(sizes_of_tensors(shapes), sizes_of_model(model)), []
    else:
        moe = bool(there["num_experts"] and model["num_experts"])
        ignored = _FREE if "yarn" in (there["rope_type"], model["rope_type"]) else _FREE | _YARN
        names = [n for n in COMMON if n not in ignored and (moe or not n.startswith("moe_"))]
        problems, warnings = (
            _differences(_by_option(there, chosen), _by_option(model, chosen))
            for chosen in ([n for n in names if (n in _SHAPES) == of] for of in (True, False))
        )
    if problems:
        raise ValueError(
            f"--load: {start.path} does not hold the model requested "
            f"(--preset {args.preset}): {'; '.join([*problems, *_remedy(script, problems, there)])}"
        )
    if warnings and not rank():
        text = f"{script}: warning: the model in {start.path} has other options: "
        print(text + "; ".join(warnings), file=sys.stderr, flush=True)


def _remedy(script: str, problems: list[str], there: Model | None) -> list[str]:
    if any(problem.startswith(f"{_VARIANT} none") for problem in problems):
        return ["--new-indexer gives a dense model an indexer with initial weights"]
    if there is None:
        return []
    if script == "generate.py":
        return ["without --preset the model is the checkpoint's own"]
    return ["--use-checkpoint-args takes the checkpoint's own"]


def _described(start: Start) -> Model | None:
    try:
        return None if start.args is None else model_from_args(start.args)
    except ValueError:
        # Arguments of another kind of model; the shapes of the tensors decide.
        return None


def _by_option(model: Model, names: Iterable[str]) -> dict[str, object]:
    return {flag_of(n): _DEFAULTS.get(n) if model[n] is None else model[n] for n in names}


def _differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    return [
        f"{name} {_shown(there[name])} in the checkpoint, {_shown(value)} requested"
        for name, value in here.items()
        if name in there and there[name] != value
    ]


def _shown(value: object) -> str:
    if isinstance(value, list):
        # The only list is moe_layer_freq.
        return f"{value.count(0)} dense and {value.count(1)} MoE layers"
    return "none" if value is None else str(value)


def sizes_of_model(model: Model) -> dict[str, object]:
    """The sizes of a model by option, among them all of :func:`sizes_of_tensors`."""
    heads, rope = model["num_attention_heads"], model["qk_pos_emb_head_dim"]
    return {flag_of(name): value for name, value in model.items()} | {
        "the vocabulary": model["vocab_size"],
        _LATENT: model["kv_lora_rank"] + rope,
        _KEYS: heads * (model["qk_head_dim"] + rope),
        _VALUES: heads * (model["qk_head_dim"] + model["v_head_dim"]),
        _OUTPUT: heads * model["v_head_dim"],
    }


def sizes_of_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Sizes of a model by option, as far as the shapes of its tensors show them.

    Args:
        shapes: By name, as in a distributed checkpoint: a tensor for each layer, or one for all
            layers with the layers as its first dimension.
    """
    layers, found = 0, {}
    for name, shape in shapes.items():
        number, suffix = None, name
        if match := _LAYER.fullmatch(name):
            number, suffix = match.groups()
            layers = max(layers, shape[0] if number is None else int(number) + 1)
            shape = shape[1:] if number is None else shape
        found.setdefault(suffix, shape)
    sizes: dict[str, object] = {}
    if layers:
        variant = "dsa" if _INDEXER in found else None
        sizes = {"--num-layers": layers, "--num-experts": None, _VARIANT: variant}
    if _UNCOMPRESSED_QUERY in found:
        sizes["--q-lora-rank"] = None
    if _ROUTER in found:
        sizes[_SHARED_EXPERTS] = None
    for tensor, dimension, multiple, option in _SIZES_OF_TENSORS:
        if tensor in found:
            sizes[option] = found[tensor][dimension] // multiple
    return sizes


def require_same_run(start: Start, args: argparse.Namespace) -> None:
    """Refuse to resume a run with other options than it had.

    Args:
        start: A checkpoint of that run.
        args: Of this run.

    Raises:
        ValueError: Naming all options that differ, in one line.
    """
    # Checkpoints of releases without LoRA have no arguments of it.
    there, here = ({n: getattr(x, n, None) for n in _RUN} for x in (start.args, args))
    there, here = there | model_from_args(start.args), here | model_of(args)
    problems = []
    for name in here:
        if name != "max_position_embeddings" and there[name] != here[name]:
            values = f" {there[name]} there, {here[name]} here"
            problems.append(_NAMES.get(name, flag_of(name)) + values * (name != _RUN[-1]))
    if problems:
        raise ValueError(
            f"--load: the run in {start.path} differs from this one: {'; '.join(problems)}. "
            "To resume, use the same; --finetune takes the weights only and starts anew"
        )
