"""scripts/train.py --lora-rank: only the adapter changes, alike on every layout of processes."""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from counting import count_from
from training.metrics import read_metrics, series

_BASE = (
    "--num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 4 --data text.txt --eval-iters 0"
)
_LR = "--lr 1e-2 --lr-decay-style constant --lr-warmup-iters 0 --train-iters 4"
_RUN = f"{_BASE} --load base --finetune {_LR}"
LAYOUTS = {
    "tensor parallel, full recomputation": "--tensor-model-parallel-size 2 "
    "--sequence-parallel --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "pipeline parallel, selective recomputation": "--pipeline-model-parallel-size 2 "
    "--recompute-granularity selective --recompute-modules mla_up_proj core_attn",
    "context parallel": "--context-parallel-size 2 --form absorbed",
    "data parallel": "--overlap-grad-reduce",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, train) -> Path:
    """Random weights, and an adapter of theirs that was trained for four iterations."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text.txt").write_text(count_from(0, 700))
    train(folder, f"{_BASE} --train-iters 0 --save base")
    output = train(folder, f"{_RUN} --lora-rank 4 --save whole --save-adapter first --metrics w")
    assert "are trained" in output and "saved the adapter in first" in output
    return folder


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in dist_checkpointing.load_plain_tensors(str(path)).items()
        if isinstance(tensor, torch.Tensor) and not name.startswith("optimizer.")
    }


def test_only_the_adapter_changes(folder):
    """The base to the bit, biases that balance experts included; the losses fall."""
    base, tuned = (_tensors(folder / n) for n in ("base/iter_0000000", "whole/iter_0000004"))
    assert all(torch.equal(base[name], tuned[name]) for name in base)
    lora = {name: tensor for name, tensor in tuned.items() if name not in base}
    assert len(lora) == 2 * 2 * 6 and all(tensor.any() for tensor in lora.values())
    losses = series(read_metrics(folder / "w"), "train_loss")
    assert losses[4] < losses[1] - 0.01


def test_resumed_to_the_bit(folder, train):
    """Adapter, its optimizer states and everything else of the run."""
    run = f"{_BASE} {_LR} --lora-rank 4 --save parts --metrics p"
    train(folder, f"{run} --load base --finetune --exit-interval 2")
    train(folder, f"{run} --load parts")
    assert series(read_metrics(folder / "p"), "train_loss") == series(
        read_metrics(folder / "w"), "train_loss"
    )
    error = train(folder, f"{run} --load parts --lora-rank 2", expect=2)
    assert "--lora-rank 4 there, 2 here" in error


def test_layouts_of_processes(folder, train):
    """Each continues the adapter as one process does."""
    results = {}
    for name, options in {"one": "", **LAYOUTS}.items():
        run = f"{_RUN} --lora-adapter first --save-adapter {len(results)} --metrics m{len(results)}"
        train(folder, f"{run} {options}", processes=2 if options else 0)
        losses = series(read_metrics(folder / f"m{len(results)}"), "train_loss")
        adapter = load_file(folder / str(len(results)) / "adapter_model.safetensors")
        results[name] = [*losses.values()], adapter
    losses, adapter = results.pop("one")
    assert losses[-1] < losses[0]
    for name, (found, tensors) in results.items():
        assert found == pytest.approx(losses, rel=1e-4), name
        worst = max(float((tensors[key] - adapter[key]).abs().max()) for key in adapter)
        assert worst < 2e-3, f"{name}: {worst}"  # Adam divides small differences by small ones


def test_clipping_would_change_the_base(folder, train):
    """Refused when the model is made."""
    assert "LoRA needs qk_clip=False" in train(folder, f"{_RUN} --lora-rank 4 --qk-clip", expect=2)
