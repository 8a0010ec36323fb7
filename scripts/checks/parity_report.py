#!/usr/bin/env python3
"""Parity mode of whole models on one device: whether it holds, and what it costs.

    $ python scripts/checks/parity_report.py --json docs/parity.json
    $ python scripts/checks/parity_report.py --device cpu --width 64 --tokens 96

Models of DeepSeek-V3's attention, 4 layers, dense and with 16 experts, run the training forward,
prefill, chunked prefill and decode; those that differ from the training forward by a bit are listed
(none should). Then a training forward, a step and a decoded token are timed, by default and in
parity mode. A GPU computes in bfloat16, a CPU in float32. It uses the models of the tests, so it
runs in a checkout only. The exit code is 1 if anything differs; the last line of output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.arguments import add_common, parse, use_device
from benchmarks.kit.report import write_json
from console.parser import Parser
from console.script import Failure, leave, run_script

_DECODED = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Verify and measure; returns the exit code."""
    return run_script("parity_report.py", lambda: _verify(argv))


def _verify(argv: Sequence[str] | None) -> None:
    parser = Parser("parity_report.py", __doc__)
    add = parser.add_argument
    add_common(parser, json=None, device=None)
    add("--width", type=int, default=2048, help="hidden size")
    add("--tokens", type=int, default=4096, help="of the timed forward")
    args = parse(parser, argv)
    if args.tokens < 2 * _DECODED:
        parser.error(f"--tokens must be at least {2 * _DECODED}, got {args.tokens}")
    use_device(args.device)
    warnings.filterwarnings("ignore")
    report = _report(args)
    if args.json:
        write_json(args.json, report)
    print(json.dumps(report))
    differing = {name: ways for name, ways in report["differs"].items() if ways}
    if differing:
        raise Failure(f"other bits than the training forward's: {differing}")


def _report(args: argparse.Namespace) -> dict:
    import torch

    from absorbed_mla.cpu_host import enable_cpu_host
    from tests.support import world

    enable_cpu_host()
    world.start()
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return {
        **provenance.source(),
        "device": torch.cuda.get_device_name() if on_gpu else provenance.processor(),
        "versions": provenance.versions(("torch", "triton", "megatron-core")),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": args.tokens,
        "differs": _differs(args.width, dtype),
        "times": {
            "default": _times(args, dtype, batch_invariant=False),
            "parity": _times(args, dtype, batch_invariant=True),
        },
    }


def _sizes(width: int) -> dict:
    """Of a model with DeepSeek-V3's attention."""
    from tests.support.cases import TINY

    widths = {"q_lora_rank": 1536, "kv_lora_rank": 512, "nope": 128, "rope": 64, "v": 128}
    mla = replace(TINY, hidden=width, heads=16, original_context=4096, **widths)
    return {"mla": mla, "num_layers": 4, "ffn_hidden_size": 2 * width, "init_method_std": 0.05}


def _differs(width: int, dtype) -> dict[str, list[str]]:
    """Ways that do not have the bits of the training forward, of two models."""
    import torch

    from absorbed_mla.batch_invariant import batch_invariant_mode
    from tests.support.parity import differences, parity_model

    experts = {
        "num_moe_experts": 16,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_topk": 6,
        "moe_ffn_hidden_size": width // 4,
        "moe_router_score_function": "sigmoid",
        "activation_func": torch.nn.functional.silu,
    }
    found = {}
    for name, more in (("dense", {}), ("experts", experts)):
        # Megatron adds up more than two experts of a token by atomics otherwise.
        torch.use_deterministic_algorithms(bool(more), warn_only=True)
        with batch_invariant_mode():
            found[name] = differences(parity_model(dtype, **_sizes(width), **more))
        print(f"{name}: {', '.join(found[name]) or 'every way has the same bits'}", flush=True)
    torch.use_deterministic_algorithms(False)
    return found


def _times(args: argparse.Namespace, dtype, batch_invariant: bool) -> dict[str, float]:
    """Milliseconds of a forward, a step, and a decoded token of 16 requests."""
    import torch

    from absorbed_mla.batch_invariant import batch_invariant_mode
    from tests.support.parity import cached, parity_model, tokens_of, trained

    with batch_invariant_mode() if batch_invariant else contextlib.nullcontext():
        model = parity_model(dtype, batch_invariant=batch_invariant, **_sizes(args.width))
        tokens = tokens_of(1, args.tokens)
        batch = tokens_of(16, min(600, args.tokens))
        prompt = batch.shape[1] - _DECODED
        positions = torch.arange(args.tokens, device=tokens.device)[None]

        def step() -> None:
            model.train()
            model.zero_grad(set_to_none=True)
            model(tokens, positions, None, labels=tokens).float().mean().backward()

        def ahead(count: int) -> None:
            cached(model, batch[:, : prompt + count], [prompt] + [1] * count)

        decoded = _seconds(lambda: ahead(_DECODED)) - _seconds(lambda: ahead(0))
        return {
            "forward_ms": 1e3 * _seconds(lambda: trained(model, tokens)),
            "step_ms": 1e3 * _seconds(step),
            "decode_ms": 1e3 * decoded / _DECODED,
        }


def _seconds(run: Callable[[], object], repetitions: int = 5) -> float:
    """The least of some runs after one that compiles."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    run()
    times = []
    for _ in range(repetitions):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    leave(main())
