"""Recall and loss on held-out text, from the checkpoints of all stages."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from absorbed_mla.checkpoint.distributed import load_model_weights
from absorbed_mla.dsa.warm_up import INDEXER
from absorbed_mla.testing.indexer_recall import Recall, measure_recall
from benchmarks.kit import provenance
from sparse.stages import Settings, Stage
from training import distributed
from training.arguments import parse_arguments
from training.batch import BatchSource
from training.checkpoint_folder import find_checkpoint
from training.data import Windows, read_corpus, split_corpus
from training.loop import global_batch_loss
from training.metrics import read_metrics, series
from training.model import build_config, build_model, unwrap
from training.model_options import resolve_model
from training.sparse_stage import stage_fields
from training.tokenizers import build_tokenizer
from training.validation import validate_arguments


def measure(stages: dict[str, Stage], settings: Settings) -> dict:
    """Measure every checkpoint of the stages that follow the dense one.

    Returns:
        The content of the JSON. ``rows`` has for each checkpoint the held-out loss, and the recall
        of all layers and of each, with dense and with sparse attention; ``indexer_loss`` the loss
        of the warm-up and the sparse stage by iteration.
    """
    args = parse_arguments(stages["sparse"].argv)
    args.model = resolve_model(args)
    validate_arguments(args, distributed.world_size())
    device = distributed.initialize(args)
    held_out = _held_out(args, device)
    config = build_config(args, args.model, device, **stage_fields(args, args.model))
    model = build_model(args, config, args.model, device).eval()
    rows = list(_rows(model, held_out, stages, settings.eval_iters))
    distributed.finish()
    threads = torch.get_num_threads()
    return {
        "environment": provenance.describe(device.type == "cuda", torch.float32, threads=threads),
        "settings": asdict(settings),
        "rows": rows,
        "indexer_loss": {
            name: series(read_metrics(stages[name].metrics), "indexer_loss")
            for name in ("warm-up", "sparse")
        },
    }


def _held_out(args: argparse.Namespace, device: torch.device) -> BatchSource:
    """The text that train.py would validate with."""
    corpus = read_corpus(args.data, build_tokenizer(args.tokenizer, args.trust_remote_code))
    _, tokens = split_corpus(corpus.tokens, args.split_percent)
    windows = Windows(tokens, args.seq_length, 0, "validation (--split)")
    return BatchSource(windows, args.micro_batch_size, args.micro_batch_size, 0, 1, device, None)


def _rows(
    model: nn.Module, held_out: BatchSource, stages: dict[str, Stage], batches: int
) -> Iterator[dict]:
    gpt = unwrap(model)
    # The indexers that the warm-up began with: the same seed made them.
    indexers = [p for name, p in gpt.named_parameters() if INDEXER in name]
    untrained = [p.detach().clone() for p in indexers]
    for name in ("warm-up", "sparse", "continued"):
        for iteration, path, has_indexers in _checkpoints(stages[name]):
            for own, value in zip(indexers, untrained):
                own.data.copy_(value)
            load_model_weights(gpt, path, initial=() if has_indexers else (INDEXER,))
            print(f"measuring {name} at iteration {iteration}", flush=True)
            row = _row(model, held_out, batches, dense_only=name == "continued")
            yield {"stage": name, "iteration": iteration, **row}


def _checkpoints(stage: Stage) -> Iterator[tuple[int, Path, bool]]:
    """Iteration, folder, and whether it has indexers; first the one that the stage began with."""
    assert stage.before is not None
    yield 0, find_checkpoint(str(stage.before.folder)), stage.before.is_sparse
    for path in sorted(stage.folder.glob("iter_*")):
        yield int(path.name.removeprefix("iter_")), path, stage.is_sparse


def _row(model: nn.Module, held_out: BatchSource, batches: int, *, dense_only: bool) -> dict:
    """Losses and recall of one checkpoint, with the attention of either kind.

    Args:
        model: With its weights.
        held_out: The text.
        batches: How much of it.
        dense_only: The model is dense, and its indexers are of no interest.
    """
    row: dict[str, object] = {}
    for attention in ("dense",) if dense_only else ("dense", "sparse"):
        with measure_recall(model, attend_to_all=attention == "dense") as found:
            losses = [
                global_batch_loss(model, held_out, batch, backward=False)[0]
                for batch in range(batches)
            ]
        row[f"{attention}_loss"] = sum(losses) / len(losses)
        if not dense_only:
            total = sum(found.values(), Recall())
            row["by_chance"] = total.share_by_chance
            row[f"recall_in_{attention}"] = total.share
            row[f"layers_in_{attention}"] = [one.share for one in found.values()]
    return row
