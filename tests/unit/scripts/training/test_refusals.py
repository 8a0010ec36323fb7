"""Command lines that scripts/train.py refuses in one line that names the option."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_conversion import command_line
from tests.support import needs
from tests.support.environment import without_launcher
from tests.support.train_arguments import checked, resolved
from training.checks import validate_arguments
from training.refusals import parse_split

SCRIPTS = Path(__file__).resolve().parents[4] / "scripts"
FROM = "--use-checkpoint-args --load ."
SIZES = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 16"
DSA = f"--experimental-attention-variant dsa {SIZES}"
NO_INDEXER = "needs a model with an indexer: --experimental-attention-variant dsa"
# In a folder with an empty file ``file``.
AT_ONCE = [
    ("--lrr 3", "unrecognized arguments: --lrr (--help lists all options)"),
    ("--form fast", "--form: invalid choice: 'fast'"),
    ("--preset gpt-2", "--preset must be one of tiny"),
    ("--scale-down 0", "--scale-down must be at least 1, got 0"),
    ("--use-checkpoint-args", "--use-checkpoint-args needs --load"),
    ("--finetune", "--finetune needs --load"),
    (f"--new-indexer {SIZES}", "--new-indexer needs --load, the dense checkpoint to start"),
    (
        f"--new-indexer --experimental-attention-variant none {SIZES}",
        "--new-indexer needs --experimental-attention-variant dsa, got none",
    ),
    ("--save-interval 5", "--save-interval needs --save"),
    ("--split 90,20", "--split must be two percentages"),
    ("--split 90", "--split must be two percentages"),
    ("--train-only indexer", f"--train-only indexer {NO_INDEXER}"),
    ("--lora-rank 0", "r must be an integer above 0, got 0"),
    ("--lora-rank 4 --lora-target-modules gate_proj", "target_modules must be 'all-linear' or"),
    ("--lora-alpha 4", "--lora-alpha needs --lora-rank or --lora-adapter"),
    ("--save-adapter there", "--save-adapter needs --lora-rank or --lora-adapter"),
    ("--lora-adapter there --lora-rank 4", "rank of its own and excludes --lora-rank"),
    ("--lora-adapter nowhere", "--lora-adapter: there is no folder nowhere"),
    ("--lora-rank 4 --attention standard", "LoRA needs --attention absorbed, got standard"),
    ("--lora-rank 4 --train-only indexer --preset glm-5", "excludes LoRA"),
    ("--dsa-indexer-topk 5", f"--dsa-indexer-topk {NO_INDEXER}"),
    ("--dsa-indexer-loss-coeff 1", f"--dsa-indexer-loss-coeff {NO_INDEXER}"),
    ("--no-dsa-indexer-scoring-relu", f"--no-dsa-indexer-scoring-relu {NO_INDEXER}"),
    (
        "--preset glm-5 --experimental-attention-variant none --dsa-indexer-topk 5",
        f"--dsa-indexer-topk {NO_INDEXER}",
    ),
    ("--qk-clip --attention standard", "--qk-clip needs --attention absorbed, which records"),
    (f"{DSA} --attention standard", "--attention must be absorbed for a model with sparse"),
    ("--async-save", "--async-save is not taken"),
    ("--data-path foo", "--data-path is not taken: the data is that of --data"),
    ("--mock-data", "--mock-data is not taken: the data is that of --data"),
    ("--tokenizer-model nowhere", "--tokenizer-model is not taken: --tokenizer"),
    ("--spec no.module name", "--spec is not taken: --attention"),
    ("--dataloader-type cyclic", "--dataloader-type is not taken"),
    ("--full-validation", "--full-validation is not taken"),
    ("--ckpt-format torch", "--ckpt-format is not taken: checkpoints are torch_dist"),
    ("--no-save-optim", "--no-save-optim is not taken"),
    *(
        (f"{FROM} {words}", f"takes the model from --load and excludes {words.split()[0]};")
        for words in (
            *("--preset tiny", "--scale-down 1", "--hidden-size 128", "--q-lora-rank 0"),
            *("--vocab-size 320", "--make-vocab-size-divisible-by 64", "--rope-type rope"),
            *("--num-experts 0", "--moe-layer-freq 1", "--dsa-indexer-topk 5"),
            "--no-dsa-indexer-scoring-relu",
        )
    ),
    ("--load absent", "--load absent: there is no such folder"),
    ("--load .", "there is no distributed checkpoint in ."),
    ("--data absent", "--data: there is no file or folder absent"),
    ("--tokenizer absent", "--tokenizer: there is no folder absent"),
    ("--save file", "--save file cannot be written: not a folder"),
    ("--metrics file/inside", "--metrics file/inside cannot be written"),
    ("--plot .", "--plot . cannot be written"),
]
# Runs train.py once for each command line, in an interpreter that cannot import PyTorch.
WITHOUT_MEGATRON = """
import contextlib, io, json, sys
sys.modules.update(torch=None, megatron=None, numpy=None)
from training.entry import main
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(line.split())
    print(json.dumps([code, err.getvalue()]))
"""


@pytest.fixture(scope="module")
def at_once(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and stderr of every line of ``AT_ONCE``."""
    folder, lines = tmp_path_factory.mktemp("refused"), [line for line, _ in AT_ONCE]
    (folder / "file").touch()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEGATRON, json.dumps(lines)],
        env=without_launcher(PYTHONPATH=f"{SCRIPTS}:{SCRIPTS.parent}"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(lines, map(json.loads, done.stdout.splitlines())))


@pytest.mark.parametrize(("line", "message"), AT_ONCE)
def test_before_megatrons_import(at_once, line, message):
    code, error = at_once[line]
    assert code == 2
    assert error.startswith("train.py: error: ") and error.count("\n") == 1
    assert message in error


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
CP2 = "--context-parallel-size 2"
# The allgather dispatcher does not support packs of different lengths.
PACKED = f"{CP2} --packed --moe-token-dispatcher-type allgather"
FP8 = "--fp8-format hybrid --bf16"
WARM_UP = f"{DSA} --train-only indexer"
TINY = "of the preset tiny"
HELP = "--help lists all options"


@pytest.mark.parametrize(
    ("line", "processes", "message"),
    [
        *((line, 1, HELP) for line in ("--lr x", "--attention", "--fp8-recipe x")),
        ("--num-layers 0", 1, "--num-layers must be above 0, got 0"),
        ("--kv-lora-rank -1", 1, "--kv-lora-rank must be above 0, got -1"),
        ("--qk-pos-emb-head-dim 7", 1, "--qk-pos-emb-head-dim must be even, got 7"),
        ("--moe-layer-freq [0,1]", 1, "one entry for each of --num-layers 3, got 2"),
        ("--moe-router-topk 9", 1, f"-topk must be at most num_experts {TINY}, 4, got 9"),
        ("--preset deepseek-v3 --num-experts 100", 1, "8 routing groups, got 100"),
        (f"{TP2} --num-attention-heads 3", 2, "--num-attention-heads must be divisible"),
        (f"{TP2} --seq-length 127", 2, "--seq-length with --sequence-parallel must be"),
        (TP2, 3, "must divide the number of processes (torchrun --nproc-per-node), got 3"),
        ("--tensor-model-parallel-size 2", 2, f"num_experts {TINY}, 4, with --tensor"),
        ("--sequence-parallel", 1, "needs --tensor-model-parallel-size above 1, got 1"),
        ("--pipeline-model-parallel-size 2", 2, f"num_layers {TINY} must be divisible"),
        ("--expert-model-parallel-size 3", 3, f"num_experts {TINY} must be"),
        ("--expert-model-parallel-size 2", 1, "ranks x --context-parallel-size 1, got 1"),
        ("--global-batch-size 24", 2, "--global-batch-size must be divisible"),
        ("--packed --micro-batch-size 2", 1, "--packed needs --micro-batch-size 1, got 2"),
        ("--seq-length 0", 1, "--seq-length must be at least 1, got 0"),
        ("--seq-length 9999", 1, f"max_position_embeddings {TINY}, 4096"),
        ("--lr -1", 1, "--lr must be at least 0"),
        ("--hidden-dropout 1", 1, "--hidden-dropout must be in [0, 1)"),
        ("--seed 0", 1, "--seed must be at least 1, got 0"),
        ("--recompute-granularity full", 1, "needs --recompute-method"),
        ("--recompute-num-layers 1", 1, "need --recompute-granularity full"),
        ("--recompute-modules mlp", 1, "needs --recompute-granularity selective"),
        ("--fp8-recipe delayed", 1, "--fp8-recipe needs --fp8-format"),
        ("--fp8-format hybrid", 1, "--fp8-format needs --bf16"),
        (f"{FP8} --transformer-impl local", 1, "--transformer-impl transformer_engine, got"),
        (f"{FP8} --num-layers-at-end-in-bf16 2", 1, "needs --first-last-layers-bf16"),
        (f"{FP8} --first-last-layers-bf16 --fp8-recipe delayed", 1, "does not go with --fp8-recip"),
        (
            f"{FP8} {CP2} {TP2} --micro-batch-size 1 --seq-length 96",
            4,
            "needs 64 to divide the tokens of a forward pass, --micro-batch-size x --seq-length, ",
        ),
        ("--bf16 --fp16", 1, "--fp16: not allowed with argument --bf16"),
        ("--lr-decay-iters 5", 1, "must be above --lr-warmup-iters 10, got 5"),
        ("--lr-decay-style WSD", 1, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ("--qk-clip-threshold 0", 1, "--qk-clip-threshold must be above 0, got 0.0"),
        ("--qk-clip-alpha 2", 1, "--qk-clip-alpha must be from 0 to 1, got 2.0"),
        ("--context-parallel-size 0", 1, "--context-parallel-size must be at least 1, got 0"),
        (CP2, 3, "x --context-parallel-size 2 = 2 must divide the number of processes"),
        (f"{CP2} {TP2}", 6, "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x"),
        (
            f"{CP2} --seq-length 126",
            2,
            "by 2 x --context-parallel-size 2 = 4 (each rank takes an early and a late chunk), got",
        ),
        (
            f"{TP4} {CP2} --seq-length 132",
            8,
            "--context-parallel-size 2 x --tensor-model-parallel-size 4 = 8, got 132",
        ),
        (f"{CP2} --cp-comm-type a2a", 2, "one of auto, all_gather, p2p, got 'a2a': a2a and"),
        (
            f"{CP2} --cp-comm-type auto --attention standard",
            2,
            "--cp-comm-type auto needs --attention absorbed, got standard; name one of all_gather",
        ),
        (
            f"{CP2} --attention standard --transformer-impl local",
            2,
            "--transformer-impl transformer_engine, got local",
        ),
        (f"{TP2} --make-vocab-size-divisible-by 3", 2, "divisible-by must be divisible by --tens"),
        ("--cp-comm-type a2a+p2p", 1, "all heads share one latent"),
        (f"{CP2} --cp-comm-type p2p p2p", 2, f"for each of num_layers {TINY}, 3, got 2"),
        (f"{CP2} --expert-model-parallel-size 4", 2, "--context-parallel-size 2, got 2"),
        (f"{CP2} --global-batch-size 12", 4, "the default micro_batch_size 8 x 2 data-parallel"),
        (
            f"{PACKED} --num-layers 4 --pipeline-model-parallel-size 2",
            4,
            "experts needs --pipeline-model-parallel-size 1, got 2",
        ),
        (f"{PACKED} --expert-model-parallel-size 4", 4, "that divides it, got 4"),
        (
            "--experimental-attention-variant dsa --dsa-indexer-topk 5",
            1,
            "an indexer needs --dsa-indexer-n-heads, --dsa-indexer-head-dim, which has no value",
        ),
        (f"{DSA} --dsa-indexer-topk 0", 1, "--dsa-indexer-topk must be above 0, got 0"),
        (f"{DSA} --dsa-indexer-head-dim 24", 1, "-dim must be a power of two, got 24; --no-dsa-"),
        (f"{DSA} --dsa-indexer-head-dim 8", 1, f"must be at least qk_pos_emb_head_dim {TINY}, 16"),
        (f"{WARM_UP} --dsa-indexer-use-sparse-loss", 1, "excludes --dsa-indexer-use-sparse-loss"),
        (f"{WARM_UP} --dsa-indexer-loss-coeff 0", 1, "needs a --dsa-indexer-loss-coeff above 0"),
        (f"{DSA} --dsa-indexer-loss-coeff -1", 1, "--dsa-indexer-loss-coeff must be at least 0"),
        (f"{DSA} --dsa-indexer-loss-coeff nan", 1, "--dsa-indexer-loss-coeff must be at least 0"),
        *(
            pytest.param(line, 1, message, marks=needs.no_gpu)
            for line, message in (
                ("--fp16", "--fp16 needs a GPU"),
                ("--moe-grouped-gemm", "--moe-grouped-gemm needs a GPU"),
                ("--transformer-impl transformer_engine", "transformer_engine needs a GPU"),
                ("--use-torch-fsdp2", "needs a GPU"),
                ("--use-distributed-optimizer", "needs TransformerEngine"),
            )
        ),
    ],
)
def test_before_any_work(line, processes, message):
    with pytest.raises(ValueError) as error:
        checked(line, processes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "[2]", "[]", "x", "__import__('os')", "[0]*10**9", "[0]+1"]
)
def test_patterns_of_experts(text):
    with pytest.raises(ValueError, match="--moe-layer-freq"):
        resolved(["--moe-layer-freq", text])


def test_vocabulary_of_a_checkpoint():
    """The error names the command that helps, and none that --use-checkpoint-args excludes."""
    args = resolved(TP2)
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


def test_what_is_accepted_beside_it():
    assert checked("--attention standard --transformer-impl local").attention == "standard"
    # Experts have every rank that tensor and pipeline parallelism leave.
    checked(f"{CP2} --expert-model-parallel-size 4", 4)
    # Packs are padded, so that any length can be cut.
    checked(f"{CP2} --packed --seq-length 127", 2)
    assert (parse_split("95,5"), parse_split("100,0")) == (95, 100)


def test_defaults_that_follow_from_others():
    args = checked("--lr 1e-3 --train-iters 50", 2)
    assert (args.micro_batch_size, args.global_batch_size) == (8, 16)
    assert args.min_lr == pytest.approx(1e-4)
    assert args.lr_decay_iters == 50
    # Megatron refuses runs that are shorter than their warm-up.
    assert checked("--train-iters 4").lr_decay_iters == 11
    assert checked("--packed").micro_batch_size == 1
    # Context-parallel ranks are no data-parallel ranks.
    assert checked(f"{CP2} --micro-batch-size 3", 4).global_batch_size == 6
