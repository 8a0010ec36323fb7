"""What rank 0 prints before and after a run."""

from __future__ import annotations

import argparse

from training import distributed
from training.data import Corpus
from training.metrics import series
from training.presets import ModelPreset

_ROWS = 12


def run_header(args: argparse.Namespace, preset: ModelPreset, corpus: Corpus, start: int) -> str:
    """The model, the processes and the data in a few lines."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    scaled = f" / {args.scale_down}" if args.scale_down > 1 else ""
    moe = sum(preset.moe_layer_freq)
    model = f"of {args.load}" if args.use_checkpoint_args else f"{args.preset}{scaled}"
    lines = [
        f"model      {model}, {args.attention} MLA: "
        f"{preset.num_layers - moe} dense and {moe} MoE layers, hidden {preset.hidden_size}, "
        f"{preset.num_attention_heads} heads of "
        f"{preset.qk_head_dim} + {preset.qk_pos_emb_head_dim}, latent {preset.kv_lora_rank}, "
        f"vocabulary {preset.vocab_size}",
        f"processes  {distributed.world_size()}: TP {tp}"
        + (" with sequence parallelism" if args.sequence_parallel else "")
        + f", PP {pp}, CP {cp}, DP {distributed.world_size() // (tp * pp * cp)}, "
        + f"EP {args.expert_model_parallel_size}",
        f"data       {args.data or 'Python standard library'}: {corpus.num_documents:,} documents, "
        f"{len(corpus.tokens):,} tokens; {args.global_batch_size} x {args.seq_length} tokens per "
        "iteration",
    ]
    if args.load:
        verb = f"resumed at iteration {start}" if start else "started from the weights"
        lines.append(f"checkpoint {args.load}, {verb}")
    return "\n".join(lines)


def comparison_table(runs: dict[str, list[dict]]) -> str:
    """Training losses of two runs side by side, at about a dozen iterations both have."""
    (first, first_records), (second, second_records) = runs.items()
    left, right = series(first_records, "train_loss"), series(second_records, "train_loss")
    common = sorted(left.keys() & right.keys())
    if not common:
        return f"{first} and {second} have no iteration in common"
    stride = max(1, len(common) // _ROWS)
    chosen = sorted({common[0], *common[stride - 1 :: stride], common[-1]})
    width = max(len(first), len(second), 12)
    lines = [f"{'iteration':>9}  {first:>{width}}  {second:>{width}}  {'difference':>10}"]
    lines += [
        f"{i:>9}  {left[i]:>{width}.4f}  {right[i]:>{width}.4f}  {left[i] - right[i]:>+10.1e}"
        for i in chosen
    ]
    return "\n".join(lines)
