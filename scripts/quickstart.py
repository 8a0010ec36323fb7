"""Write a standard MLA checkpoint, load it into absorbed MLA, train both side by side.

Run by ``scripts/quickstart.sh``, which makes the environment and says what happens.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

# Both models compute the same function in fp32; sums in another order differ by some ulps.
LOGITS_TOLERANCE = 1e-5
# Rounding separates the two trainings slowly, and expert routing amplifies it.
LOSS_TOLERANCE = 0.05
BATCH, SEQ_LENGTH = 4, 128


def main() -> int:
    """Run all steps; the exit code is 1 if one of them shows something wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train-iters", type=int, default=150)
    args = parser.parse_args()
    output = args.output.resolve()
    checkpoint = output / "standard_checkpoint"
    try:
        _announce(1, "a checkpoint of a GPT with Megatron's own MLASelfAttention")
        _clear(checkpoint)
        difference = check_logits(checkpoint)
        if not difference <= LOGITS_TOLERANCE:
            raise RuntimeError(f"the logits differ by {difference:.1e}")
        _announce(3, "training the standard model, TP=1")
        train(output, "standard", args.train_iters)
        _announce(4, "training the absorbed model from the same checkpoint, TP=2 with SP")
        train(output, "absorbed", args.train_iters)
        _announce(5, "both losses (nats per byte)")
        report(output)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def check_logits(checkpoint: Path) -> float:
    """Write the standard checkpoint and compare both models' logits on real text.

    Returns:
        The largest difference of two logits, relative to the largest logit.
    """
    import torch

    from absorbed_mla.distributed_checkpoint import load_model_weights, save_model_weights
    from training import distributed
    from training.arguments import parse_arguments
    from training.model import build_config, build_model, unwrap
    from training.model_options import padded_vocab_size, resolve_model
    from training.tokenizers import build_tokenizer
    from training.validation import validate_arguments

    tokenizer = build_tokenizer(None)
    models = {}
    for attention in ("standard", "absorbed"):
        # Another seed, so that equal logits can only come from the checkpoint.
        seed = "1" if attention == "standard" else "2"
        args = parse_arguments(["--attention", attention, "--seed", seed])
        args.model = resolve_model(args)
        validate_arguments(args, 1)
        vocab_size = padded_vocab_size(args, args.model, tokenizer.vocab_size)
        preset = args.model.replace(vocab_size=vocab_size)
        if attention == "standard":
            device = distributed.initialize(args)
        distributed.seed(args.seed)
        config = build_config(args, preset, device)
        models[attention] = unwrap(build_model(args, config, preset, device)).eval()
    save_model_weights(models["standard"], checkpoint)
    print(f"written to {checkpoint}")

    _announce(2, "the same checkpoint in absorbed MLA")
    load_model_weights(models["absorbed"], checkpoint)
    text = Path(warnings.__file__).read_bytes()[: BATCH * SEQ_LENGTH]
    tokens = torch.tensor(list(text)).view(BATCH, SEQ_LENGTH)
    positions = torch.arange(SEQ_LENGTH).expand(BATCH, -1)
    with torch.no_grad():
        logits = {name: model(tokens, positions, None) for name, model in models.items()}
    distributed.finish()
    difference = (logits["absorbed"] - logits["standard"]).abs().max()
    relative = float(difference / logits["standard"].abs().max())
    print(f"largest relative difference of the logits: {relative:.1e} (must be <= 1e-05)")
    return relative


def train(output: Path, attention: str, iterations: int) -> None:
    """Train one of the models from the checkpoint by scripts/train.py."""
    processes = 2 if attention == "absorbed" else 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(ROOT / "scripts/train.py")]
    command += ["--preset", "tiny", "--attention", attention, "--train-iters", str(iterations)]
    command += ["--load", str(output / "standard_checkpoint"), "--finetune"]
    command += ["--metrics", str(output / f"{attention}.jsonl")]
    command += ["--eval-interval", str(iterations // 5)]
    if processes > 1:
        command += ["--tensor-model-parallel-size", str(processes), "--sequence-parallel"]
    print("$ " + " ".join(["torchrun", *command[3:]]).replace(str(ROOT) + "/", ""), flush=True)
    if not sys.stdout.isatty():
        command += ["--no-progress"]
    # More threads would wait for each other on a machine that is doing something else.
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"training the {attention} model failed")


def report(output: Path) -> None:
    """Print and draw both losses; raise if they do not fall, or not together."""
    from training.metrics import read_metrics, series
    from training.plot import plot_losses

    records = {name: read_metrics(output / f"{name}.jsonl") for name in ("standard", "absorbed")}
    standard, absorbed = (series(r, "train_loss") for r in records.values())
    valid = [series(r, "valid_loss") for r in records.values()]
    last = max(standard)
    print(f"{'iteration':>9}  {'standard':>9}  {'absorbed':>9}  {'difference':>10}")
    rows = sorted({1, last, *(round(last * part / 8) for part in range(1, 8))})
    for row in rows:
        gap = absorbed[row] - standard[row]
        print(f"{row:>9}  {standard[row]:>9.4f}  {absorbed[row]:>9.4f}  {gap:>+10.1e}")
    if all(last in losses for losses in valid):
        print(f"{'held out':>9}  {valid[0][last]:>9.4f}  {valid[1][last]:>9.4f}")
    plot = output / "loss.png"
    names = {"standard": "standard MLA, TP=1", "absorbed": "absorbed MLA, TP=2, SP"}
    plot_losses({names[name]: r for name, r in records.items()}, plot)
    worst = max(abs(absorbed[i] - standard[i]) for i in standard)
    print(f"the loss fell from {absorbed[1]:.3f} to {absorbed[last]:.3f}; plot: {plot}")
    if not absorbed[last] < absorbed[1]:
        raise RuntimeError("the loss of the absorbed model did not fall")
    if not worst <= LOSS_TOLERANCE:
        raise RuntimeError(f"the losses differ by up to {worst:.3f}, more than {LOSS_TOLERANCE}")


def _announce(step: int, what: str) -> None:
    print(f"\n[{step}/5] {what}", flush=True)


def _clear(checkpoint: Path) -> None:
    """Make an empty folder, deleting an earlier run's checkpoint but nothing else."""
    if checkpoint.is_dir() and any(checkpoint.iterdir()):
        if not (checkpoint / "metadata.json").exists():
            raise ValueError(
                f"{checkpoint} is not empty and holds no checkpoint; name another --output"
            )
        shutil.rmtree(checkpoint)
    checkpoint.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    # Megatron warns about every optional package it does not find.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    sys.exit(main())
