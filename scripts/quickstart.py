"""From a Hugging Face checkpoint to a trained absorbed MLA model, back, and to generated text.

Run by ``scripts/quickstart.sh``, which makes the environment and says what happens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

# Both models compute the same function in fp32; sums in another order differ by some ulps.
LOGITS_TOLERANCE = 1e-4
# Rounding separates the two trainings slowly, and expert routing amplifies it.
LOSS_TOLERANCE = 0.05
PROMPT = "def main("
NEW_TOKENS = 60
STEPS = 7


def main() -> int:
    """Run all steps; the exit code is 1 if one of them shows something wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train-iters", type=int, default=150)
    args = parser.parse_args()
    output = args.output.resolve()
    try:
        _announce(1, "transformers makes a tiny DeepSeek-V3 and saves it")
        make_hugging_face_model(output / "hugging_face")
        _announce(2, "convert to absorbed MLA; the same text through both gives the same logits")
        convert(output / "hugging_face", output / "absorbed", "absorbed")
        check_logits(output / "hugging_face", output / "absorbed")
        _announce(3, "train with Megatron's own standard MLA, TP=1, to compare with")
        train(output, "standard", args.train_iters)
        _announce(4, "train the absorbed model, TP=2 with SP, from the same checkpoint")
        train(output, "absorbed", args.train_iters)
        _announce(5, "both losses (nats per byte)")
        report(output)
        _announce(6, "convert back; transformers loads what Megatron trained, and writes")
        convert(output / "trained", output / "trained_hugging_face", "hf")
        written = generate(output / "trained_hugging_face")
        _announce(7, "our model writes too, from a cache of latents in Megatron's engine, TP=2")
        generate_from_latents(output / "trained", written)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def make_hugging_face_model(folder: Path) -> None:
    """A model of the size of ``--preset tiny``, every byte a token, with random weights."""
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
    """Convert a checkpoint by the command that users have."""
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
        raise RuntimeError(f"the logits differ by {relative:.1e}")


def _converter(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "checkpoint_conversion", *arguments]
    print("$ " + " ".join(["python", *command[1:]]).replace(str(ROOT) + "/", ""), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        raise RuntimeError(f"checkpoint_conversion {arguments[0]} failed")
    return done


def train(output: Path, attention: str, iterations: int) -> None:
    """Train one of the models from the converted checkpoint by scripts/train.py."""
    processes = 2 if attention == "absorbed" else 1
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(ROOT / "scripts/train.py")]
    command += ["--load", str(output / "absorbed"), "--finetune", "--use-checkpoint-args"]
    command += ["--attention", attention, "--train-iters", str(iterations)]
    command += ["--metrics", str(output / f"{attention}.jsonl")]
    command += ["--eval-interval", str(iterations // 5)]
    if processes > 1:
        command += ["--tensor-model-parallel-size", str(processes), "--sequence-parallel"]
        command += ["--save", str(output / "trained")]
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


def generate(folder: Path) -> list[int]:
    """Let transformers continue some source code with the trained weights; the new tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        loss = float(model(prompt, labels=prompt).loss)
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    text = bytes(token for token in written[0].tolist() if token < 256)
    print(f"{type(model).__name__}, {loss:.2f} nats per byte on its prompt, continues:")
    print(repr(text.decode(errors="replace")))
    return written[0].tolist()[len(PROMPT) :]


def generate_from_latents(folder: Path, expected: list[int]) -> None:
    """Continue the same prompt by scripts/generate.py; raise if the tokens are others."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "scripts/generate.py"), "--load", str(folder)]
    command += ["--tensor-model-parallel-size", "2", "--prompt", PROMPT, "--greedy", "--json"]
    command += ["--num-tokens-to-generate", str(NEW_TOKENS), "--ignore-eos"]
    print("$ " + " ".join(["torchrun", *command[3:]]).replace(str(ROOT) + "/", ""), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError("generate.py failed")
    found, total = (json.loads(line) for line in done.stdout.splitlines())
    print(f"{found['text']!r}\n{total['tokens_per_second']:.0f} tokens/s")
    if found["tokens"] != expected:
        raise RuntimeError(f"transformers wrote other tokens: {expected}, not {found['tokens']}")
    print("the same tokens as transformers'")


def _announce(step: int, what: str) -> None:
    print(f"\n[{step}/{STEPS}] {what}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\..*")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
