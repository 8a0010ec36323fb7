"""What rank 0 shows of a run: lines before it, a table and loss curves after it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from training import distributed
from training.data import Corpus
from training.metrics import series
from training.presets import ModelPreset

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 12
# Below this the axis of differences is linear, so that 0 has a place on it.
_SMALLEST_DIFFERENCE = 1e-8


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


def plot_losses(
    runs: dict[str, list[dict]], path: str | Path, *, title: str = "Loss during training"
) -> None:
    """Draw training and validation losses of one or more runs; of two also their difference.

    Args:
        runs: Metrics records by the run's name.
        path: PNG to write.
        title: Stands above the curves.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if len(runs) == 2:
        figure, (losses, differences) = pyplot.subplots(
            2, sharex=True, figsize=(8, 7), height_ratios=(3, 1.4)
        )
        _draw_differences(differences, runs)
    else:
        figure, losses = pyplot.subplots(figsize=(8, 5))
    _draw_losses(losses, runs)
    losses.set_title(title)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.axes[-1].set_xlabel("iteration")
    figure.tight_layout()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _draw_losses(axes: Axes, runs: dict[str, list[dict]]) -> None:
    for number, (name, records) in enumerate(runs.items()):
        train, valid = series(records, "train_loss"), series(records, "valid_loss")
        color = f"C{number}"
        # The second run is drawn thin over the first: equal curves stay visible.
        first = number == 0
        width = 3.0 if first else 1.0
        axes.plot(list(train), list(train.values()), color=color, linewidth=width, label=name)
        if valid:
            style, size = ("o--", 9) if first else ("x:", 6)
            label = f"{name}, validation"
            x, y = list(valid), list(valid.values())
            axes.plot(x, y, style, color=color, markersize=size, label=label)
    axes.set_ylabel("loss per token (nats)")


def _draw_differences(axes: Axes, runs: dict[str, list[dict]]) -> None:
    left, right = runs.values()
    for key, label, style in (("train_loss", "training", "-"), ("valid_loss", "validation", "o--")):
        difference = absolute_differences(left, right, key)
        if difference:
            axes.plot(list(difference), list(difference.values()), style, color="C2", label=label)
    axes.set_yscale("symlog", linthresh=_SMALLEST_DIFFERENCE)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("|difference| (nats)")
    axes.set_title("How far the two are apart", fontsize="medium")


def absolute_differences(left: list[dict], right: list[dict], key: str) -> dict[int, float]:
    """How far ``key`` is apart in two runs, for each iteration that both have."""
    first, second = series(left, key), series(right, key)
    return {i: abs(second[i] - first[i]) for i in sorted(first.keys() & second.keys())}
