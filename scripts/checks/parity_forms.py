#!/usr/bin/env python3
# ruff: noqa: D103, E402, B023  an experiment, taken out again
"""The two forms of attention bit by bit, and what decoding in the expanded one would cost.

    parity_forms.py JSON --load CHECKPOINTS

Logits of one model over the same tokens in both forms, outputs of one layer, and counts of a decode
step's operations and bytes. A model of real head widths comes from train.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

import torch
from torch import Tensor

# Of the H200 that decode.json was measured on, TFLOP/s and TB/s of a product and a copy, and the
# microseconds of a decode step's attention there by heads and requests of 8,192 keys.
PRODUCT, COPY, KEYS = 695e12, 4.27e12, 8192
TODAY = {(16, 1): 28.5, (16, 32): 101.9, (16, 128): 303.6}
TODAY |= {(128, 1): 33.0, (128, 32): 149.3, (128, 128): 482.2}


def ordered(x: Tensor) -> Tensor:
    """Integers that are neighbours where floating-point numbers are."""
    kind, sign = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}[x.element_size()]
    bits = x.contiguous().view(kind).long()
    return torch.where(bits < 0, -(bits & sign), bits)


def compared(a: Tensor, b: Tensor) -> dict[str, float]:
    """How many elements differ, by how many ulp, and by how much of the root mean square."""
    ulp = (ordered(a) - ordered(b)).abs().flatten().double()
    gap = (a.double() - b.double()).abs() / b.double().square().mean().sqrt()
    most = ulp.kthvalue(max(1, int(0.99 * len(ulp)))).values.item()
    return {
        "elements": len(ulp),
        "differ": (ulp > 0).double().mean().item(),
        "ulp median": ulp.median().item(),
        "ulp 99 %": most,
        "gap rms": gap.square().mean().sqrt().item(),
        "gap largest": gap.max().item(),
    }


def models(folder: str) -> list[dict]:
    """Logits of trained weights, absorbed beside expanded."""
    import copy

    from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer
    from rollout.arguments import parse_arguments
    from rollout.policy import build_policy
    from training import megatron_loop
    from training.arguments import set_vocabulary
    from training.data import read_corpus

    text, device, rows = read_corpus(None, ByteTokenizer()).tokens, None, []
    tokens = torch.tensor(text[100_000 : 100_000 + 16 * 256].reshape(16, 256), dtype=torch.long)
    for precision in ("", "--bf16"):
        for operators in ("default", "parity mode's"):
            found = {}
            for form in ("absorbed", "expanded"):
                argv = ["--load", folder, "--use-checkpoint-args", "--form", form]
                args = parse_arguments([*argv, *precision.split()], 1)
                set_vocabulary(args, ByteTokenizer.vocab_size)
                device = device or megatron_loop.initialize(args)
                megatron_loop.seed(1)
                model, *_ = build_policy(copy.copy(args), device)
                model.eval()
                context = parity_operators() if operators != "default" else torch.no_grad()
                with torch.no_grad(), context:
                    logits = model(tokens, torch.arange(256).expand(16, -1), None)
                found[form] = logits.bfloat16() if precision else logits
            log_probs = {f: x.float().log_softmax(-1) for f, x in found.items()}
            gap = (log_probs["absorbed"] - log_probs["expanded"]).abs()
            gap = gap[:, :-1].gather(-1, tokens[:, 1:, None])
            row = {"what": "logits", "precision": precision or "fp32", "operators": operators}
            row |= compared(found["absorbed"], found["expanded"])
            row |= {
                "log-prob gap mean": gap.mean().item(),
                "log-prob gap largest": gap.max().item(),
            }
            rows.append(row | {"dtype": str(logits.dtype)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def parity_operators():
    from absorbed_mla.batch_invariant import batch_invariant_mode

    return batch_invariant_mode()


def layers() -> list[dict]:
    """Outputs of one layer of DeepSeek-V3's head widths, 16 heads, 512 tokens, random weights."""
    from tests.oracle import OracleMLA
    from tests.support.harness import Setup, random_attention

    mla = OracleMLA(
        hidden=1024, heads=16, q_lora_rank=512, kv_lora_rank=512, nope=128, rope=64, v=128
    )
    x, rows = torch.randn(512, 1, 1024, generator=torch.Generator().manual_seed(3)), []
    for dtype in (torch.float32, torch.bfloat16):
        for operators in ("default", "parity mode's"):
            found = []
            for form in ("absorbed", "expanded"):
                layer = random_attention(
                    mla,
                    Setup(
                        form=form, dtype=dtype, query_chunk_size=256, expansion_chunk_size=1 << 20
                    ),
                )
                context = parity_operators() if operators != "default" else torch.no_grad()
                with torch.no_grad(), context:
                    found.append(layer(x.to(dtype), None)[0])
            row = {"what": "layer", "precision": str(dtype), "operators": operators}
            rows.append(row | compared(*found))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def costs() -> list[dict]:
    """Of one layer's decode step: operations, bytes and the least time of either way."""
    rows = []
    for (heads, requests), today in TODAY.items():
        keys, head = requests * KEYS, heads * 2 * 128
        latents, weights, cached = keys * 576 * 2, head * 512 * 2, keys * (head + 64) * 2
        absorbed = 2 * heads * keys * (576 + 512)
        attended = 2 * heads * keys * (192 + 128)
        expanding = 2 * keys * 512 * head + attended
        row = {"heads": heads, "requests": requests, "today us": today}
        row |= {"today GFLOP": absorbed / 1e9, "today MB": (latents + weights) / 1e6}
        row |= {"expanding GFLOP": expanding / 1e9, "expanding MB": (latents + weights) / 1e6}
        row |= {"expanding least us": 1e6 * max(expanding / PRODUCT, (latents + weights) / COPY)}
        row |= {"cached k, v GFLOP": attended / 1e9, "cached k, v MB": cached / 1e6}
        row |= {"cached k, v least us": 1e6 * max(attended / PRODUCT, cached / COPY)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def roles() -> list[dict]:
    """One layer's rows of a sequence, prompt rows expanded and the others absorbed, in parity mode.

    The bits of a forward over all of it beside those of prefill, whole and in chunks, and decode.
    """
    from absorbed_mla.core_attention.tiled_reference import TILE_KEYS, attend_to_tiles

    rows = []
    heads, c, nope, rope, v, prompt, tokens = 8, 512, 128, 64, 128, 150, 182
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):

        def random(*shape: int, deviation: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * deviation).to(dtype)

        w_uk, w_uv = (
            random(heads, nope, c, deviation=c**-0.5),
            random(heads, v, c, deviation=c**-0.5),
        )
        q, kv = random(tokens, heads, nope + rope), random(tokens, c + rope)

        def tiles(keys: Tensor, first: int, count: int):
            for start in range(0, first + count, TILE_KEYS):
                found = keys[start : start + TILE_KEYS]
                found = torch.nn.functional.pad(found, (0, 0, 0, TILE_KEYS - len(found)))
                seen = start + torch.arange(TILE_KEYS) <= first + torch.arange(count)[:, None]
                yield found * seen[..., None], seen

        def expanded(first: int, last: int) -> Tensor:
            """Of rows ``first`` to ``last``; every key is expanded by products of its own row."""
            out = []
            for h in range(heads):
                latent, k_rope = kv[:last, :c], kv[:last, c:]
                key = torch.cat((latent @ w_uv[h].T, latent @ w_uk[h].T, k_rope), -1)
                query = torch.nn.functional.pad(q[first:last, h : h + 1], (v, 0)).float()
                found = attend_to_tiles(query, tiles(key, first, last - first), 192**-0.5, v)[0]
                out.append(found[:, 0].to(dtype))
            return torch.stack(out, 1)

        def absorbed(first: int, last: int) -> Tensor:
            rows = q[first:last]
            latent = torch.stack([rows[:, h, :nope] @ w_uk[h] for h in range(heads)], 1)
            query = torch.cat((latent, rows[..., nope:]), -1).float()
            found = attend_to_tiles(query, tiles(kv[:last], first, last - first), 192**-0.5, c)[0]
            return torch.stack([found[:, h].to(dtype) @ w_uv[h].T for h in range(heads)], 1)

        with torch.no_grad(), parity_operators():
            training = torch.cat((expanded(0, prompt), absorbed(prompt, tokens)))
            steps = range(prompt, tokens)
            decoded = torch.cat([absorbed(n, n + 1) for n in steps])
            chunks = torch.cat([expanded(a, b) for a, b in ((0, 40), (40, 97), (97, prompt))])
            one = torch.cat([expanded(n, n + 1) for n in steps])
        row = {"what": "roles", "precision": str(dtype)}
        row |= {"prefill equal": torch.equal(chunks, training[:prompt])}
        row |= {"decode equal": torch.equal(decoded, training[prompt:])}
        row |= {"decode against expanded": compared(decoded, one)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--load", required=True)
    args = parser.parse_args()
    result = {"costs": costs(), "roles": roles(), "models": models(args.load), "layers": layers()}
    Path(args.target).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
