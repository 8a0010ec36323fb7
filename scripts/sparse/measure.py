"""Recall and loss on held-out text, from the checkpoints of all stages."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from absorbed_mla.checkpoint.distributed import load_model_weights
from absorbed_mla.dsa.warm_up import INDEXER
from absorbed_mla.testing.indexer_recall import Recall, measure_recall
from benchmarks.kit import provenance
from sparse.stages import Stage
from training import megatron_loop
from training.arguments import parse_arguments, set_vocabulary
from training.batch import Batch, make_batch
from training.checkpoint import find_checkpoint
from training.checks import validate_arguments
from training.data import Windows, build_tokenizer, read_corpus, split_corpus
from training.metrics import read_metrics, series
from training.model import build_gpt, model_config


def measure(stages: dict[str, Stage], settings: Namespace) -> dict:
    """Measure every checkpoint of the stages that follow the dense one.

    Returns:
        The content of the JSON. ``rows`` has for each checkpoint the held-out loss, and the recall
        of all layers and of each, with dense and with sparse attention; ``indexer_loss`` the loss
        of the warm-up and the sparse stage by iteration.
    """
    args = parse_arguments(stages["sparse"].argv)
    validate_arguments(args)
    tokenizer = build_tokenizer(args.tokenizer, args.trust_remote_code)
    set_vocabulary(args, tokenizer.vocab_size)
    device = megatron_loop.initialize(args)
    _, tokens = split_corpus(read_corpus(args.data, tokenizer).tokens, args.split_percent)
    # The text that train.py would validate with.
    windows = Windows(tokens, args.seq_length, 0, "validation (--split)")
    model = build_gpt(model_config(args), device).eval()
    held_out = _batches(windows, settings, device)
    rows = list(_rows(model, held_out, stages))
    megatron_loop.finish()
    threads = torch.get_num_threads()
    return {
        "environment": provenance.describe(device.type == "cuda", torch.float32, threads=threads),
        "settings": vars(settings),
        "rows": rows,
        "indexer_loss": {
            name: series(read_metrics(stages[name].metrics), "indexer_loss")
            for name in ("warm-up", "sparse")
        },
    }


def _batches(windows: Windows, settings: Namespace, device: torch.device) -> list[Batch]:
    size = settings.batch_size
    rows = [windows[index] for index in range(settings.eval_iters * size)]
    stacked = torch.from_numpy(np.stack(rows)).split(size)
    return [make_batch(few, device) for few in stacked]


def _rows(gpt: GPTModel, held_out: list[Batch], stages: dict[str, Stage]) -> Iterator[dict]:
    # The indexers that the warm-up began with: the same seed made them.
    indexers = [p for name, p in gpt.named_parameters() if INDEXER in name]
    untrained = [p.detach().clone() for p in indexers]
    for name in ("warm-up", "sparse", "continued"):
        for iteration, path, has_indexers in _checkpoints(stages[name]):
            for own, value in zip(indexers, untrained):
                own.data.copy_(value)
            load_model_weights(gpt, path, initial=() if has_indexers else (INDEXER,))
            print(f"measuring {name} at iteration {iteration}", flush=True)
            row = _row(gpt, held_out, dense_only=name == "continued")
            yield {"stage": name, "iteration": iteration, **row}


def _checkpoints(stage: Stage) -> Iterator[tuple[int, Path, bool]]:
    """Iteration, folder, and whether it has indexers; first the one that the stage began with."""
    assert stage.before is not None
    yield 0, find_checkpoint(str(stage.before.folder)), stage.before.is_sparse
    for path in sorted(stage.folder.glob("iter_*")):
        yield int(path.name.removeprefix("iter_")), path, stage.is_sparse


def _row(gpt: GPTModel, held_out: list[Batch], *, dense_only: bool) -> dict:
    """Losses and recall of one checkpoint, with the attention of either kind.

    Args:
        gpt: With its weights.
        held_out: The text.
        dense_only: The model is dense, and its indexers are of no interest.
    """
    row: dict[str, object] = {}
    for attention in ("dense",) if dense_only else ("dense", "sparse"):
        with measure_recall(gpt, attend_to_all=attention == "dense") as found:
            losses = [_loss(gpt, batch) for batch in held_out]
        row[f"{attention}_loss"] = sum(losses) / len(losses)
        if not dense_only:
            total = sum(found.values(), Recall())
            row["by_chance"] = total.share_by_chance
            row[f"recall_in_{attention}"] = total.share
            row[f"layers_in_{attention}"] = [one.share for one in found.values()]
    return row


@torch.no_grad()
def _loss(gpt: GPTModel, batch: Batch) -> float:
    return gpt(batch.tokens, batch.position_ids, None, labels=batch.labels).double().mean().item()
