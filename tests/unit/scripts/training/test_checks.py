"""Mistakes that scripts/train.py reports before any work, and defaults that depend on options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from checkpoint_conversion import command_line
from tests.support import needs
from tests.support.train_arguments import checked, resolved
from training.checks import parse_split, validate_arguments


def _validate(*argv: str, world_size: int = 1):
    return checked(list(argv), world_size)


_TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
_CP2 = ["--context-parallel-size", "2"]
# The allgather dispatcher does not support packs of different lengths.
_PACKED_CP2 = [*_CP2, "--packed", "--moe-token-dispatcher-type", "allgather"]
_PACKED_CP2_PP2 = [*_PACKED_CP2, "--num-layers", "4", "--pipeline-model-parallel-size", "2"]
_FP8 = ["--fp8-format", "hybrid", "--bf16"]
_TP4 = ["--tensor-model-parallel-size", "4", "--sequence-parallel"]


@pytest.mark.parametrize(
    ("argv", "world_size", "message"),
    [
        ([*_TP2, "--num-attention-heads", "3"], 2, "--num-attention-heads must be divisible"),
        ([*_TP2, "--seq-length", "127"], 2, "--seq-length with --sequence-parallel must be"),
        ([*_TP2], 3, "must divide the number of processes (torchrun --nproc-per-node), got 3"),
        (
            ["--tensor-model-parallel-size", "2"],
            2,
            "num_experts of the preset tiny, 4, with --tensor",
        ),
        (["--sequence-parallel"], 1, "needs --tensor-model-parallel-size above 1, got 1"),
        (
            ["--pipeline-model-parallel-size", "2"],
            2,
            "num_layers of the preset tiny must be divisible",
        ),
        (["--expert-model-parallel-size", "3"], 3, "num_experts of the preset tiny must be"),
        (["--expert-model-parallel-size", "2"], 1, "ranks x --context-parallel-size 1, got 1"),
        (["--global-batch-size", "12"], 2, "--global-batch-size must be divisible"),
        (["--packed", "--micro-batch-size", "2"], 1, "--packed needs --micro-batch-size 1, got 2"),
        (["--seq-length", "0"], 1, "--seq-length must be at least 1, got 0"),
        (["--seq-length", "9999"], 1, "max_position_embeddings of the preset tiny, 4096"),
        (["--lr", "-1"], 1, "--lr must be at least 0"),
        (["--hidden-dropout", "1"], 1, "--hidden-dropout must be in [0, 1)"),
        (["--split", "90,20"], 1, "--split must be two percentages"),
        (["--recompute-granularity", "full"], 1, "needs --recompute-method"),
        (["--recompute-num-layers", "1"], 1, "need --recompute-granularity full"),
        (["--recompute-modules", "mlp"], 1, "needs --recompute-granularity selective"),
        (["--fp8-recipe", "delayed"], 1, "--fp8-recipe needs --fp8-format"),
        (["--fp8-format", "hybrid"], 1, "--fp8-format needs --bf16"),
        ([*_FP8, "--transformer-impl", "local"], 1, "--transformer-impl transformer_engine, got"),
        ([*_FP8, "--num-layers-at-end-in-bf16", "2"], 1, "needs --first-last-layers-bf16"),
        (
            [*_FP8, "--first-last-layers-bf16", "--fp8-recipe", "delayed"],
            1,
            "does not go with --fp8-recipe delayed",
        ),
        (
            [*_FP8, *_CP2, *_TP2, "--micro-batch-size", "1", "--seq-length", "96"],
            4,
            "needs 64 to divide the tokens of a forward pass, --micro-batch-size x --seq-length, ",
        ),
        (["--bf16", "--fp16"], 1, "--fp16: not allowed with argument --bf16"),
        (["--seed", "0"], 1, "--seed must be at least 1, got 0"),
        (["--lr-decay-iters", "5"], 1, "must be above --lr-warmup-iters 10, got 5"),
        (["--async-save"], 1, "--async-save is not taken"),
        (["--data-path", "foo"], 1, "--data-path is not taken: the data is that of --data"),
        (["--mock-data"], 1, "--mock-data is not taken: the data is that of --data"),
        (["--tokenizer-model", "nowhere"], 1, "--tokenizer-model is not taken: --tokenizer"),
        (["--spec", "no.module", "name"], 1, "--spec is not taken: --attention"),
        (["--dataloader-type", "cyclic"], 1, "--dataloader-type is not taken"),
        (["--full-validation"], 1, "--full-validation is not taken"),
        (["--ckpt-format", "torch"], 1, "--ckpt-format is not taken: checkpoints are torch_dist"),
        (["--no-save-optim"], 1, "--no-save-optim is not taken"),
        (["--lr-decay-style", "WSD"], 1, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        pytest.param(["--use-torch-fsdp2"], 1, "needs a GPU", marks=needs.no_gpu),
        pytest.param(
            ["--use-distributed-optimizer"], 1, "needs TransformerEngine", marks=needs.no_gpu
        ),
        (["--save-interval", "5"], 1, "--save-interval needs --save"),
        (["--finetune"], 1, "--finetune needs --load"),
        (["--context-parallel-size", "0"], 1, "--context-parallel-size must be at least 1, got 0"),
        (_CP2, 3, "x --context-parallel-size 2 = 2 must divide the number of processes"),
        ([*_CP2, *_TP2], 6, "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x"),
        ([*_CP2, "--seq-length", "126"], 2, "by 2 x --context-parallel-size 2 = 4 "),
        ([*_CP2, "--seq-length", "126"], 2, "(each rank takes an early and a late chunk), got 126"),
        (
            [*_TP4, *_CP2, "--seq-length", "132"],
            8,
            "--context-parallel-size 2 x --tensor-model-parallel-size 4 = 8, got 132",
        ),
        ([*_CP2, "--cp-comm-type", "a2a"], 2, "one of auto, all_gather, p2p, got 'a2a': a2a and"),
        (
            [*_CP2, "--cp-comm-type", "auto", "--attention", "standard"],
            2,
            "--cp-comm-type auto needs --attention absorbed, got standard; name one of all_gather",
        ),
        (
            [*_TP2, "--make-vocab-size-divisible-by", "3"],
            2,
            "--make-vocab-size-divisible-by must be divisible by --tensor-model-parallel-size 2",
        ),
        (["--cp-comm-type", "a2a+p2p"], 1, "all heads share one latent"),
        (
            [*_CP2, "--cp-comm-type", "p2p", "p2p"],
            2,
            "for each of num_layers of the preset tiny, 3, got 2",
        ),
        ([*_CP2, "--expert-model-parallel-size", "4"], 2, "--context-parallel-size 2, got 2"),
        (
            [*_CP2, "--global-batch-size", "12"],
            4,
            "the default micro_batch_size 8 x 2 data-parallel ranks",
        ),
        ([*_PACKED_CP2_PP2], 4, "experts needs --pipeline-model-parallel-size 1, got 2"),
        ([*_PACKED_CP2, "--expert-model-parallel-size", "4"], 4, "that divides it, got 4"),
    ],
)
def test_bad_options_name_the_option(argv, world_size, message):
    with pytest.raises(ValueError) as error:
        _validate(*argv, world_size=world_size)
    assert message in str(error.value)


def test_vocabulary_of_a_checkpoint():
    """The error names the command that helps, and none that --use-checkpoint-args excludes."""
    args = resolved("--tensor-model-parallel-size 2 --sequence-parallel")
    args.use_checkpoint_args, args.load, args.world_size = True, Path("some where"), 2
    args.model_vocab_size = 257
    with pytest.raises(ValueError) as error:
        validate_arguments(args)
    what, remedy = str(error.value).split(". ")
    assert what == (
        "vocab_size of the checkpoint in --load, which counts the padding, must be divisible by "
        "--tensor-model-parallel-size 2, got 257"
    )
    [command] = re.findall(r"absorbed-mla-convert (.+);", remedy)
    parsed = command_line.parse_arguments(shlex.split(command))
    assert (parsed.source, parsed.vocab_multiple) == (args.load, 2)


def test_standard_attention_on_local_layers_is_not_cut():
    options = ["--attention", "standard", "--transformer-impl", "local"]
    with pytest.raises(ValueError, match="--transformer-impl transformer_engine, got local"):
        _validate(*options, *_CP2, world_size=2)
    assert _validate(*options).attention == "standard"


def test_context_parallel_ranks_are_no_data_parallel_ranks():
    args = _validate(*_CP2, "--micro-batch-size", "3", world_size=4)
    assert args.global_batch_size == 6
    # Experts have every rank that tensor and pipeline parallelism leave.
    _validate(*_CP2, "--expert-model-parallel-size", "4", world_size=4)
    # Packs are padded, so that any length can be cut.
    _validate(*_CP2, "--packed", "--seq-length", "127", world_size=2)


@needs.no_gpu
@pytest.mark.parametrize(
    "argv",
    [
        ["--fp16"],
        ["--moe-grouped-gemm"],
        ["--transformer-impl", "transformer_engine"],
    ],
)
def test_gpu_options_need_a_gpu(argv):
    with pytest.raises(ValueError, match=rf"{argv[0]}.* needs a GPU"):
        _validate(*argv)


def test_defaults_that_follow_from_others():
    args = _validate("--lr", "1e-3", "--train-iters", "50", world_size=2)
    assert (args.micro_batch_size, args.global_batch_size) == (8, 16)
    assert args.min_lr == pytest.approx(1e-4)
    assert args.lr_decay_iters == 50
    # Megatron refuses runs that are shorter than their warm-up.
    assert _validate("--train-iters", "4").lr_decay_iters == 11
    assert _validate("--packed").micro_batch_size == 1


def test_split():
    assert parse_split("95,5") == 95
    assert parse_split("100,0") == 100
