"""From a Hugging Face checkpoint to a trained absorbed MLA model, back, and to generated text.

``scripts/quickstart.sh`` makes the environment and runs this; its --help lists the steps.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from console.outputs import require_writable
from console.parser import Parser
from console.script import Failure, leave, run_script
from counting import continuation, count_from, right_numbers, write_texts

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

# Both models compute the same function in fp32, but sum in another order.
LOGITS_TOLERANCE = 1e-4
# The two trainings differ by rounding, which expert routing amplifies slowly.
LOSS_TOLERANCE = 0.05
PROMPTS = tuple(count_from(number, 3) + ", " for number in (25, 66, 96))
NEW_TOKENS = 60
STEPS = 7
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
CONVERTER = [sys.executable, "-m", "checkpoint_conversion"]


def main() -> int:
    """Run all steps; returns the exit code."""
    return run_script("quickstart.py", _steps)


def _steps() -> None:
    parser = Parser("quickstart.py", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of what the steps write")
    parser.add_argument("--train-iters", type=int, default=200, help="of each training")
    args = parser.parse_args()
    require_writable(folders={"--output": args.output})
    output = args.output.resolve()
    _announce(1, "transformers makes a tiny DeepSeek-V3 and saves it")
    make_hugging_face_model(output / "hugging_face")
    _announce(2, "convert to absorbed MLA; the same text through both gives the same logits")
    convert(output / "hugging_face", output / "absorbed", "absorbed")
    check_logits(output / "hugging_face", output / "absorbed")
    _announce(3, "train with Megatron's own standard MLA, TP=1, to compare with")
    write_texts(output / "text")
    train(output, "standard", args.train_iters)
    _announce(4, "train the absorbed model, TP=2 with SP, from the same checkpoint")
    train(output, "absorbed", args.train_iters)
    _announce(5, "both losses (nats per byte)")
    report(output)
    _announce(6, "convert back; transformers loads what Megatron trained, and writes")
    convert(output / "trained", output / "trained_hugging_face", "hf")
    expected = generate(output / "trained_hugging_face")
    _announce(7, "our model writes too, from a cache of latents in Megatron's engine, TP=2")
    generate_from_latents(output / "trained", expected)


def make_hugging_face_model(folder: Path) -> None:
    """Save a model of the size of ``--preset tiny`` with random weights; every byte is a token."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = DeepseekV3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        max_position_embeddings=4096,
        num_nextn_predict_layers=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    disable_progress_bar()
    torch.manual_seed(1)
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    print(f"written to {folder}")


def convert(source: Path, target: Path, to: str) -> None:
    """Convert a checkpoint with absorbed-mla-convert."""
    _converter("convert", str(source), str(target), "--to", to, "--force")


def check_logits(hugging_face: Path, absorbed: Path) -> None:
    """Compare the logits of transformers and of our model; raise if they differ."""
    done = _converter("verify", str(hugging_face), str(absorbed), "--logits", "--json", quiet=True)
    logits = json.loads(done.stdout)["logits"]
    relative = logits["max_rel"]
    print(
        f"largest relative difference of the logits: {relative:.1e} over {logits['tokens']} "
        f"tokens (must be <= {LOGITS_TOLERANCE:.0e})"
    )
    if not relative <= LOGITS_TOLERANCE:
        raise Failure(f"the logits differ by {relative:.1e}")


def _converter(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess:
    return _run([*CONVERTER, *arguments], quiet=quiet)


def train(output: Path, attention: str, iterations: int) -> None:
    """Train one of the models from the converted checkpoint with scripts/train.py."""
    processes = 2 if attention == "absorbed" else 1
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes)]
    command += [str(ROOT / "scripts/train.py"), "--load", str(output / "absorbed")]
    command += ["--finetune", "--use-checkpoint-args", "--data", str(output / "text")]
    command += ["--attention", attention, "--train-iters", str(iterations)]
    # Adam divides by the size of a gradient. Where that is almost 0, a larger epsilon keeps its
    # rounding from becoming a step.
    command += ["--micro-batch-size", "16", "--lr", "3e-3", "--adam-eps", "1e-5"]
    command += ["--metrics", str(output / f"{attention}.jsonl")]
    command += ["--eval-interval", str(iterations // 5)]
    if processes > 1:
        command += ["--tensor-model-parallel-size", str(processes), "--sequence-parallel"]
        command += ["--save", str(output / "trained")]
    _run(command)


def _run(command: list[str], *, quiet: bool = False) -> subprocess.CompletedProcess:
    """Print a command as it can be typed into an activated shell, and run it.

    Args:
        command: What to run.
        quiet: Capture its output instead of showing it.
    """
    distributed = command[: len(TORCHRUN)] == TORCHRUN
    # More threads slow each other down when the machine is busy.
    variables = {"OMP_NUM_THREADS": "1"} if distributed else {}
    if distributed and shutil.which("nvidia-smi"):
        variables["CUDA_VISIBLE_DEVICES"] = ""
    print("$ " + shown(command, variables), flush=True)
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE if quiet else None,
        text=True,
    )
    if done.returncode:
        raise Failure(f"this command failed: {shown(command, variables)}")
    return done


def shown(command: list[str], variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """The command as it can be typed into an activated shell in the current folder."""
    for start, name in ((TORCHRUN, "torchrun"), (CONVERTER, "absorbed-mla-convert")):
        if command[: len(start)] == start:
            command = [name, *command[len(start) :]]
    here = f"{Path.cwd()}{os.sep}"
    words = [word.removeprefix(here) for word in command]
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in variables.items()), shlex.join(words)])


def report(output: Path) -> None:
    """Print and draw both losses; raise if they do not fall, or differ too much."""
    from training.metrics import plot_losses, read_metrics, series

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
    title = "A tiny DeepSeek-V3, trained from the same weights on the same batches"
    plot_losses({names[name]: r for name, r in records.items()}, plot, title=title)
    worst = max(abs(absorbed[i] - standard[i]) for i in standard)
    print(f"the loss fell from {absorbed[1]:.3f} to {absorbed[last]:.3f}; plot: {plot}")
    if not absorbed[last] < absorbed[1]:
        raise Failure("the loss of the absorbed model did not fall")
    if not worst <= LOSS_TOLERANCE:
        raise Failure(f"the losses differ by up to {worst:.3f}, more than {LOSS_TOLERANCE}")


def generate(folder: Path) -> list[list[int]]:
    """The tokens with which transformers continues the prompts, using the trained weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    continuations = []
    for text in PROMPTS:
        prompt = torch.tensor([list(text.encode())])
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        continuations.append(written[0].tolist()[prompt.shape[1] :])
        print(f"{type(model).__name__} continues {text!r}: {as_text(continuations[-1])}")
    return continuations


def generate_from_latents(folder: Path, expected: list[list[int]]) -> None:
    """Continue the same prompts with scripts/generate.py; raise if the tokens differ."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "scripts/generate.py"), "--load", str(folder)]
    command += ["--tensor-model-parallel-size", "2", "--greedy", "--json"]
    command += ["--num-tokens-to-generate", str(NEW_TOKENS), "--ignore-eos"]
    command += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    *rows, total = map(json.loads, _run(command, quiet=True).stdout.splitlines())
    found = [row["tokens"] for row in sorted(rows, key=lambda row: row["index"])]
    print(f"{total['tokens_per_second']:.0f} tokens/s\n\n{side_by_side(expected, found)}")
    if found != expected:
        raise Failure(f"transformers wrote other tokens: {expected}, not {found}")
    print("our model wrote the same tokens as transformers")


def side_by_side(expected: list[list[int]], found: list[list[int]]) -> str:
    """For each prompt the text of transformers, the text of our model, and the right text."""
    lines, right, numbers = [], 0, 0
    for prompt, theirs, ours in zip(PROMPTS, map(as_text, expected), map(as_text, found)):
        lines += [f"prompt        {prompt}"]
        lines += [f"transformers  {theirs}", f"our model     {ours}"]
        lines += [f"right         {continuation(prompt, NEW_TOKENS)}", ""]
        counted = right_numbers(ours, prompt)
        right, numbers = right + counted[0], numbers + counted[1]
    return "\n".join([*lines, f"{right} of {numbers} numbers are right"])


def as_text(tokens: list[int]) -> str:
    """Tokens as one line of text; those that are no byte are left out."""
    text = bytes(token for token in tokens if token < 256).decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _announce(step: int, what: str) -> None:
    print(f"\n[{step}/{STEPS}] {what}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\..*")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    leave(main())
