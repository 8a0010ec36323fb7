"""One training run: data, model, checkpoint, Megatron's loop, plot."""

from __future__ import annotations

import argparse
from functools import partial

from absorbed_mla.lora import save_peft_adapter
from absorbed_mla.qk_clip import clip_qk
from console.ranks import world_size
from training import megatron_loop
from training.arguments import set_vocabulary
from training.batch import forward_step
from training.checkpoint import Start, read_start
from training.checkpoint_model import require_same_model, require_same_run
from training.data import Corpus, Windows, build_tokenizer, read_corpus, split_corpus
from training.metrics import plot_losses
from training.model import count_parameters, training_config
from training.report import Report
from training.saving import load_checkpoint, save_checkpoint


def train(args: argparse.Namespace) -> None:
    """Read the data, compare the checkpoint, train through Megatron's loop, and report.

    Args:
        args: The command line, checked by ``validate_arguments``.

    Raises:
        ValueError: If the data or the checkpoint of ``--load`` does not fit the options.
    """
    weights_only = args.finetune or args.new_indexer
    start = read_start(args.load, finetune=weights_only) if args.load else None
    tokenizer = build_tokenizer(args.tokenizer, args.trust_remote_code)
    set_vocabulary(args, tokenizer.vocab_size)
    if start and start.iteration is None:
        require_same_model(args, start, "train.py")
    corpus = read_corpus(args.data, tokenizer)
    args.data_fingerprint = corpus.fingerprint
    if start and start.iteration is not None:
        require_same_run(start, args)
    windows = _windows(args, corpus)
    header = _run_header(args, corpus, start)
    weights = None
    args.load, args.finetune = None, False
    if start and start.iteration:
        # Megatron resumes it.
        args.load, args.ckpt_step = str(start.path.parent), start.iteration
    elif start:
        weights = str(start.path)

    report = Report(args, start.iteration or 0 if start else 0)
    report.say(header)
    config = training_config(args, weights)
    frozen = args.train_only or args.lora_rank or args.lora_adapter
    config.post_wrap_hooks.append(partial(_say_parameters, report, bool(frozen)))
    stages: list = []
    config.post_wrap_hooks.append(partial(_keep, stages))

    def saved(iteration: int, *state, **options) -> None:
        save_checkpoint(iteration, *state, **options)
        report.say(f"saved iteration {iteration} in {args.save}")

    try:
        if args.train_iters:
            packed_eod = tokenizer.end_tokens[0] if args.packed else None
            megatron_loop.pretrain(
                args,
                config,
                lambda samples, vp_stage=None: (*windows, None),
                partial(forward_step, packed_eod, report.count),
                save_checkpoint=saved,
                load_checkpoint=load_checkpoint,
                clip_qk=clip_qk,
                **report.places(),
            )
        elif args.save:
            # Of random weights, or of those that are loaded. Megatron's loop wants an iteration.
            args.train_iters = 1
            megatron_loop.initialize(args)
            model, *state = megatron_loop.set_up(args, config)
            saved(0, [model], *state, 0)
        if args.save_adapter:
            save_peft_adapter(stages, args.save_adapter)
            report.say(f"saved the adapter in {args.save_adapter}")
    finally:
        report.metrics.close()
    if args.plot and not report.rank:
        plot_losses({f"{args.attention} MLA": report.metrics.records}, args.plot)
        report.say(f"loss curves: {args.plot}")


def _windows(args: argparse.Namespace, corpus: Corpus) -> tuple[Windows, Windows | None]:
    """Of training and validation."""
    training, validation = split_corpus(corpus.tokens, args.split_percent)
    ours = Windows(training, args.seq_length, args.seed, "training")
    if not args.eval_iters:
        return ours, None
    # Seed 0, so that the validation losses of runs with different seeds can be compared; the same
    # windows each time.
    period = args.eval_iters * args.global_batch_size
    return ours, Windows(validation, args.seq_length, 0, "validation (--split)", period)


def _keep(kept: list, stages: list) -> list:
    kept += stages
    return stages


def _say_parameters(report: Report, frozen: bool, stages: list) -> list:
    """A hook of Megatron's builder; collective."""
    text = f"{sum(map(count_parameters, stages)):,} parameters"
    if frozen:
        trained = sum(count_parameters(stage, trained=True) for stage in stages)
        text += f", {trained:,} are trained"
    report.say(text)
    return stages


def _run_header(args: argparse.Namespace, corpus: Corpus, start: Start | None) -> str:
    """A few lines about the model, the processes, the data and the checkpoint."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    scaled = f" / {args.scale_down}" if args.scale_down > 1 else ""
    moe = sum(args.moe_layer_freq) if args.num_experts else 0
    model = f"of {args.load}" if args.use_checkpoint_args else f"{args.preset}{scaled}"
    lines = [
        f"model      {model}, {args.attention} MLA: "
        f"{args.num_layers - moe} dense and {moe} MoE layers, hidden {args.hidden_size}, "
        f"{args.num_attention_heads} heads of "
        f"{args.qk_head_dim} + {args.qk_pos_emb_head_dim}, latent {args.kv_lora_rank}, "
        f"vocabulary {args.padded_vocab_size}",
        *_attended(args),
        f"processes  {world_size()}: TP {tp}"
        + (" with sequence parallelism" if args.sequence_parallel else "")
        + f", PP {pp}, CP {args.context_parallel_size}, DP {args.data_parallel_size}, "
        + f"EP {args.expert_model_parallel_size}",
        f"data       {args.data or 'Python standard library'}: {corpus.num_documents:,} documents, "
        f"{len(corpus.tokens):,} tokens; {args.global_batch_size} x {args.seq_length} tokens per "
        "iteration",
    ]
    if start:
        done = start.iteration
        verb = f"resumed at iteration {done}" if done else "started from the weights"
        lines.append(f"checkpoint {args.load}, {verb}")
    return "\n".join(lines)


def _attended(args: argparse.Namespace) -> list[str]:
    """What a query of a model with an indexer attends to in this run."""
    topk = args.dsa_indexer_topk
    if topk is None:
        return []
    new = "new " if args.new_indexer else ""
    indexer = f"{new}{args.dsa_indexer_n_heads} heads of {args.dsa_indexer_head_dim}, "
    if args.train_only:
        indexer += f"warms up for top-{topk}, the attention is over all keys"
    elif topk < args.seq_length:
        indexer += f"attention over {topk} keys of up to {args.seq_length}"
    else:
        indexer += f"no choice: --seq-length {args.seq_length} is not above the top-k {topk}"
    return [f"indexer    {indexer}"]
