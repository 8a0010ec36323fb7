#!/usr/bin/env python3
"""Measure how far converted models are from transformers, and what wrong conversions would do.

    $ python scripts/checks/logits_table.py docs/measurements/conversion
    $ torchrun --nproc-per-node 2 scripts/checks/logits_table.py docs/measurements/conversion

Each run replaces the rows of its tensor-parallel size in logits.json, and prints them.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.report import write_json
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

if TYPE_CHECKING:
    from tests.conversion.models import Architecture

PACKAGES = ("transformers", "megatron-core", "torch")


def main() -> int:
    """Measure all architectures at this job's tensor-parallel size; returns the exit code."""
    return run_script("logits_table.py", _measure_all)


def _measure_all() -> None:
    parser = Parser("logits_table.py", __doc__)
    parser.add_argument("folder", type=Path, help="where logits.json goes")
    arguments = parser.parse_args()
    require_writable(folders={"folder": arguments.folder})
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\..*")
    # Only here: the imports take seconds, and mistakes are reported before.
    from absorbed_mla.cpu_host import enable_cpu_host

    enable_cpu_host()
    from tests.conversion.models import ARCHITECTURES
    from tests.support import world

    world.start()
    rows = []
    for row in (row for architecture in ARCHITECTURES for row in measure(architecture)):
        rows.append(row)
        if world.rank() == 0:
            print(", ".join(f"{name} {figure(value)}" for name, value in row.items()), flush=True)
    if world.rank() == 0:
        write(arguments.folder, rows, world.size())
    world.stop()


def measure(architecture: Architecture) -> Iterator[dict]:
    """One row per attention."""
    from checkpoint_conversion.logit_comparison import compare_logits
    from tests.conversion.converted import converted, loaded_logits
    from tests.conversion.models import ORIGINAL_CONTEXT
    from tests.support import world

    for to in ("absorbed", "megatron"):
        with converted(architecture, to) as (folder, tokens, expected):
            logits = loaded_logits(folder, tokens)
            wrong = {}
            if to == "absorbed" and world.size() == 1:
                wrong = controls(folder, tokens, expected)
        result = compare_logits(expected, logits)
        beyond = (logits - expected)[:, ORIGINAL_CONTEXT:].abs().max() / expected.abs().max()
        yield {
            "model": {"v2": "DeepSeek-V2", "v3": "DeepSeek-V3"}[architecture.family],
            "query": "q_lora" if architecture.q_lora else "no q_lora",
            "layers": "MoE" if architecture.moe else "dense",
            "position": architecture.rope,
            "attention": "absorbed" if to == "absorbed" else "standard",
            "tensor_parallel": world.size(),
            "tokens": result.tokens,
            "max_rel": result.max_rel,
            "max_rel_beyond_original_context": float(beyond),
            "kl_mean": result.kl_mean,
            "kl_max": result.kl_max,
            "same_choice": result.same_choice,
            **wrong,
        }


def controls(folder: Path, tokens, expected) -> dict[str, float]:
    """Relative errors of our model after conversions that are wrong on purpose."""
    from checkpoint_conversion.formats import open_checkpoint
    from checkpoint_conversion.logit_comparison import compare_logits
    from checkpoint_conversion.logits import (
        load_megatron_model,
        megatron_logits,
        megatron_model,
        without_mtp,
    )
    from tests.conversion.models import with_half_split_rope, with_rope

    checkpoint = open_checkpoint(folder)
    config, tensors = without_mtp(checkpoint.config, checkpoint.hugging_face_tensors())
    variants = {"rope_in_halves": (config, with_half_split_rope(tensors, config))}
    if config.hugging_face["rope_parameters"]["rope_type"] == "yarn":
        variants["mscale_all_dim_0"] = (with_rope(config, mscale_all_dim=0.0), tensors)
    errors = {}
    for name, (wrong_config, wrong_tensors) in variants.items():
        model = megatron_model(wrong_config, "absorbed")
        load_megatron_model(model, wrong_config, wrong_tensors)
        errors[name] = compare_logits(expected, megatron_logits(model, tokens)).max_rel
    return errors


def write(folder: Path, rows: list[dict], tensor_parallel: int) -> None:
    """Replace the rows of this tensor-parallel size in logits.json."""
    from tests.conversion.models import ORIGINAL_CONTEXT

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "logits.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in old if row["tensor_parallel"] != tensor_parallel] + rows
    document = {
        "date": provenance.today(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, CPU only",
        "packages": {name: version(name) for name in PACKAGES},
        "original_context": ORIGINAL_CONTEXT,
        "rows": rows,
    }
    write_json(path, document)


def figure(value: str | float) -> str:
    """A value of a row; errors in two digits."""
    return f"{value:.1e}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    leave(main())
