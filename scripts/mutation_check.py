#!/usr/bin/env python3
"""Break the package on purpose, one line at a time, and see which test notices.

Each mutation is applied to a copy of the checkout; the unit tests and then the distributed tests at
TP=2 run until the first failure. A mutation that no test notices makes the script exit with 1.

    $ python scripts/mutation_check.py
    rope_pairing           caught by tests/unit/test_property_shapes.py::...
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """One wrong line: in ``file``, ``right`` becomes ``wrong``."""

    file: str
    right: str
    wrong: str


MUTATIONS = {
    "rope_pairing": Mutation(
        "absorbed_mla/rope.py",
        "x[..., 0::2].to(compute), x[..., 1::2].to(compute)",
        "(half.to(compute) for half in x.chunk(2, dim=-1))",
    ),
    "softmax_scale": Mutation(
        "absorbed_mla/dims.py",
        "math.sqrt(dims.qk_head_dim)",
        "math.sqrt(dims.kv_down_dim)",
    ),
    "softmax_mscale": Mutation(
        "absorbed_mla/dims.py",
        "yarn_mscale(config.rotary_scaling_factor, config.mscale_all_dim)",
        "yarn_mscale(config.rotary_scaling_factor, config.mscale)",
    ),
    "kv_row_interleave": Mutation(
        "absorbed_mla/state_dict.py",
        "return w_uk.flatten(0, 1), w_uv.flatten(0, 1)",
        "return tuple(weight.split([w_uk.flatten(0, 1).shape[0], w_uv.flatten(0, 1).shape[0]]))",
    ),
    "k_rope_reduction_sp": Mutation(
        "absorbed_mla/tensor_parallel.py",
        "tensor_parallel_output_grad=True",
        "tensor_parallel_output_grad=False",
    ),
    "k_rope_reduction_no_sp": Mutation(
        "absorbed_mla/attention.py",
        "latent, k_rope = both.split(widths, dim=-1)",
        "latent, k_rope = (both.split(widths, dim=-1)[0], k_rope if not self.sequence_parallel "
        "else both.split(widths, dim=-1)[1])",
    ),
    "causal_offset": Mutation(
        "absorbed_mla/core_attention/scores.py",
        "triu(chunk.causal_offset + 1)",
        "triu(chunk.causal_offset + 2)",
    ),
    "q_norm_summed_by_host": Mutation(
        "absorbed_mla/projections.py",
        "average_gradients_across_tp_domain=True",
        "",
    ),
    "shared_dropout_seed": Mutation(
        "absorbed_mla/core_attention/scores.py",
        "            self.dropout_seed,",
        "            torch.seed() % 2**62,",
    ),
    "late_chunk_of_a_rank": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "return rank, 2 * self.cp_size - 1 - rank",
        "return rank, self.cp_size + rank",
    ),
    "positions_in_the_pack": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "return self.tokens() - starts.repeat_interleave(slots)",
        "return self.tokens()",
    ),
    "padding_is_attended": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "queries = _clamp(length - before, chunk_size)",
        "queries = chunk_size if length > before else 0",
    ),
    "ring_ignores_late_keys": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "return [(0, None), (early_keys + late_keys, None)]",
        "return [(0, None), (early_keys, None)]",
    ),
    "gradient_scaled_twice": Mutation(
        "absorbed_mla/context_parallel/all_gather.py",
        "        return own\n",
        "        return own / self.layout.cp_size\n",
    ),
    "gradient_stays_away": Mutation(
        "absorbed_mla/context_parallel/ring.py",
        "return own + transfer.received()",
        "return transfer.received() * 0 + own",
    ),
    "merge_weights": Mutation(
        "absorbed_mla/core_attention/merge.py",
        "for x in (lse, part_lse))",
        "for x in (lse, lse))",
    ),
    "window_offset": Mutation(
        "absorbed_mla/core_attention/spans.py",
        "query_start, offset = self.query_start + blind, offset + blind",
        "query_start = self.query_start + blind",
    ),
}
SUITES = {
    "tests/unit": [sys.executable, "-m", "pytest", "-x", "-q", "-W", "ignore", "tests/unit"],
    "tests/distributed (TP=2)": [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        *["-m", "pytest", "-x", "-q", "-W", "ignore", "tests/distributed"],
    ],
}


def main() -> int:
    """Run the chosen mutations and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTATIONS)}; default all")
    names = parser.parse_args().names or list(MUTATIONS)
    unknown = sorted(set(names) - set(MUTATIONS))
    if unknown:
        parser.error(f"unknown mutation {', '.join(unknown)}; known are {', '.join(MUTATIONS)}")
    if first_failure("(nothing broken)", None):
        parser.error("the tests fail without any mutation; mend that first")
    caught = [first_failure(name, MUTATIONS[name]) for name in names]
    return 0 if all(caught) else 1


def first_failure(name: str, mutation: Mutation | None) -> str | None:
    """The first test that fails under ``mutation``, printed as it is found."""
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copy = Path(folder)
        copy_checkout(copy)
        if mutation:
            mutate(copy / mutation.file, mutation)
        for suite, command in SUITES.items():
            failure = run_until_failure(command, copy)
            if failure:
                print(f"{name:24s} caught in {suite} by {failure}", flush=True)
                return failure
    print(f"{name:24s} not caught", flush=True)
    return None


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks or would track, as it is in the working tree."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def mutate(target: Path, mutation: Mutation) -> None:
    """Write the wrong line; the right one must be there exactly once."""
    source = target.read_text()
    if source.count(mutation.right) != 1:
        raise SystemExit(f"{mutation.file} does not hold {mutation.right!r} once; update the list")
    target.write_text(source.replace(mutation.right, mutation.wrong))


def run_until_failure(command: list[str], folder: Path) -> str | None:
    """The id of the first failed test, or None if all passed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    # Only a failed test counts; a broken environment or a syntax error proves nothing.
    found = re.search(r"^FAILED (\S+)", result.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(f"{' '.join(command)} did not run:\n{result.stdout}\n{result.stderr}")
    return found.group(1)


if __name__ == "__main__":
    sys.exit(main())
