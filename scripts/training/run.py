"""One training run: data, model, checkpoint, training, plot."""

from __future__ import annotations

import argparse

import torch
from megatron.core import parallel_state

from training import distributed
from training.batch import BatchSource, own_part
from training.checkpoint import Checkpointer
from training.checkpoint_model import require_same_model
from training.data import Corpus, Windows, read_corpus, split_corpus
from training.loop import Trainer
from training.metrics import plot_losses
from training.model import build_config, build_model, count_parameters
from training.model_options import padded_vocab_size, vocab_size
from training.optimizer import Optimizer
from training.presets import ModelPreset
from training.sparse_stage import stage_fields, stage_model
from training.start import read_start, require_same_run, run_options
from training.tokenizers import build_tokenizer


def train(args: argparse.Namespace) -> None:
    """Read the data, build the model, load a checkpoint, train and report.

    Args:
        args: The command line, checked by ``validate_arguments``.

    Raises:
        ValueError: If the data or the checkpoint of ``--load`` does not fit the options.
    """
    weights_only = args.finetune or args.new_indexer
    start_from = read_start(args.load, finetune=weights_only) if args.load else None
    tokenizer = build_tokenizer(args.tokenizer, args.trust_remote_code)
    preset = args.model.replace(
        vocab_size=padded_vocab_size(args, args.model, tokenizer.vocab_size)
    )
    if start_from and start_from.resumed is None:
        require_same_model(args, start_from, preset, "train.py")
    corpus = read_corpus(args.data, tokenizer)
    if start_from and start_from.resumed:
        require_same_run(start_from, run_options(args, preset, corpus.fingerprint))
    train_tokens, valid_tokens = split_corpus(corpus.tokens, args.split_percent)
    train_windows = Windows(train_tokens, args.seq_length, args.seed, "training")
    valid_windows = None
    if args.eval_iters:
        # Seed 0, so that the validation losses of runs with different seeds can be compared.
        valid_windows = Windows(valid_tokens, args.seq_length, 0, "validation (--split)")

    device = distributed.initialize(args)
    config = build_config(
        args,
        stage_model(args, preset),
        device,
        **stage_fields(args, preset),
        qk_clip=args.qk_clip,
        qk_clip_threshold=args.qk_clip_threshold,
        qk_clip_alpha=args.qk_clip_alpha,
        log_max_attention_logit=args.log_max_attention_logit,
    )
    model = build_model(args, config, preset, device)
    optimizer = Optimizer(args, model)
    tokens = vocab_size(args, args.model, tokenizer.vocab_size)
    checkpointer = Checkpointer(args, preset, model, optimizer, corpus.fingerprint, tokens)
    start = checkpointer.load(start_from) if start_from else 0
    if distributed.rank() == 0:
        print(_run_header(args, preset, corpus, start), flush=True)
    parameters = count_parameters(model)
    trained = f", {count_parameters(model, trained=True):,} are trained" if args.train_only else ""
    if distributed.rank() == 0:
        print(f"{parameters:,} parameters{trained}", flush=True)

    eod = tokenizer.eod if args.packed else None
    trainer = Trainer(
        args,
        model,
        optimizer,
        _source(args, train_windows, device, eod),
        _source(args, valid_windows, device, eod) if valid_windows else None,
        checkpointer,
        start,
    )
    trainer.run()
    if args.plot and distributed.rank() == 0:
        plot_losses({f"{args.attention} MLA": trainer.metrics.records}, args.plot)
        print(f"loss curves: {args.plot}", flush=True)


def _run_header(args: argparse.Namespace, preset: ModelPreset, corpus: Corpus, start: int) -> str:
    """A few lines about the model, the processes, the data and the checkpoint."""
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
        *_attended(args, preset),
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


def _attended(args: argparse.Namespace, preset: ModelPreset) -> list[str]:
    """What a query of a model with an indexer attends to in this run."""
    topk = preset.dsa_indexer_topk
    if topk is None:
        return []
    new = "new " if args.new_indexer else ""
    indexer = f"{new}{preset.dsa_indexer_n_heads} heads of {preset.dsa_indexer_head_dim}, "
    if args.train_only:
        indexer += f"warms up for top-{topk}, the attention is over all keys"
    elif topk < args.seq_length:
        indexer += f"attention over {topk} keys of up to {args.seq_length}"
    else:
        indexer += f"no choice: --seq-length {args.seq_length} is not above the top-k {topk}"
    return [f"indexer    {indexer}"]


def _source(
    args: argparse.Namespace, windows: Windows, device: torch.device, eod: int | None
) -> BatchSource:
    return BatchSource(
        windows=windows,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        device=device,
        packed_eod=eod,
        part=own_part(args),
    )
