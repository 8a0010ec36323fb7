#!/usr/bin/env python3
"""``LLM`` beside transformers, model by model: log-probabilities of every position.

    $ python scripts/checks/llm_beside_transformers.py --json docs/measurements/accuracy/llm.json
    $ python scripts/checks/llm_beside_transformers.py --only dense           # without a GPU, too

Small models with the routing of DeepSeek-V2, V2-Lite, V3 and V3.2, and with odd numbers of experts
and groups, are made by transformers. LLM writes greedily in bf16, with and without
TransformerEngine, CUDA graphs and the prefix cache, alone and in a batch, and in fp32. Each text is
read by transformers in fp32, which gives the errors of LLM's log-probabilities, and in bf16, whose
errors say what rounding costs: LLM's may be at most twice as large (four times the largest and the
mean square where there are experts, because rounding may choose another one). Positions of prompts
are compared where prompts are read without graphs and cached blocks.

Every case runs in a process of its own, several at a time. It uses the models of the tests, so it
runs in a checkout only. The exit code is 1 if a case fails or an error is too large.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.command import run_to_log
from benchmarks.kit.report import write_json
from console.outputs import require_writable
from console.parser import Parser
from console.script import Failure, leave, run_script

if TYPE_CHECKING:
    from tests.support.log_probs import Text

_PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "transformers")
# Of the output of a process that failed.
_LINES = 15
# Experts, groups of experts, groups that a token may take, experts of a token.
_NAMES = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
ODD_SHAPES = ((8, 2, 1, 2), (8, 4, 2, 4), (8, 4, 3, 4), (8, 4, 4, 4), (4, 2, 2, 2))
ODD_SHAPES += ((4, 2, 2, 3), (4, 2, 2, 4), (6, 2, 1, 3), (48, 3, 2, 8), (256, 8, 4, 8))
WAYS = ("transformer_engine", "graphs", "prefix_cache")
_VOCABULARY = 131
# A block of the prefix cache, and the lengths of what follows it; prompts without it.
_SHARED, _BEHIND, _OTHERS = 64, (1, 9, 56), (3, 70, 64)
NEW_TOKENS = 24


@dataclass(frozen=True)
class Model:
    """A model of transformers with random weights in bfloat16."""

    family: str  # as tests/conversion/models.py names it
    # Of the config, that differ from tests/support/wide_models.py.
    fields: dict[str, object] = field(default_factory=dict)
    q_lora: bool = True  # whether the query is compressed
    experts: bool = True  # whether there are any
    # Whether it is run with all combinations of TransformerEngine, CUDA graphs and the prefix
    # cache, and in fp32; else with all of them, and with none.
    every_way: bool = True

    def write(self, folder: Path) -> Path:
        """Make it, and save it as transformers does."""
        from tests.conversion.models import Architecture
        from tests.support.wide_models import wide_folder

        architecture = Architecture(self.family, self.q_lora, self.experts, "yarn")
        return wide_folder(folder, architecture, **self.fields)


_V2 = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
_LITE = {"n_routed_experts": 16, "num_experts_per_tok": 6, "routed_scaling_factor": 1.0}
_V3 = dict(zip(_NAMES, (32, 8, 4, 8)))
_INDEXER = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 64}
MODELS = {
    "dense": Model("v3", experts=False),
    "V2": Model("v2", {**dict(zip(_NAMES, (32, 8, 3, 6))), **_V2}),
    "V2-Lite": Model("v2", _LITE, q_lora=False),
    "V3": Model("v3", _V3),
    "V3.2": Model("v32", {**_V3, **_INDEXER}),
    **{
        "V3, {} experts in {}, {} taken, {} of a token".format(*shape): Model(
            "v3", {**dict(zip(_NAMES, shape)), "num_hidden_layers": 2}, every_way=False
        )
        for shape in ODD_SHAPES
    },
}


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    model: str  # name in :data:`MODELS`
    dtype: str  # ``"bfloat16"`` or ``"float32"``
    transformer_engine: bool  # whether TransformerEngine is there, which ``LLM`` then uses
    graphs: bool  # whether steps are CUDA graphs
    prefix_cache: bool  # whether equal beginnings are computed once

    @property
    def name(self) -> str:
        """As ``--case`` takes it."""
        return "/".join([self.model, self.dtype, *(way for way in WAYS if getattr(self, way))])

    @classmethod
    def of_name(cls, name: str) -> Case:
        """The inverse of :attr:`name`.

        Raises:
            ValueError: If there is no such case.
        """
        model, _, ways = name.partition("/")
        dtype, *options = ways.split("/")
        case = cls(model, dtype, *(way in options for way in WAYS))
        if model not in MODELS or dtype not in ("bfloat16", "float32") or case.name != name:
            raise ValueError(
                f"--case must be MODEL/DTYPE with any of {', '.join(f'/{way}' for way in WAYS)}, "
                f"got {name!r}; models: {'; '.join(MODELS)}"
            )
        return case


def cases_of(name: str, *, gpu: bool, transformer_engine: bool) -> list[Case]:
    """What is measured of a model, on a machine with or without a GPU and TransformerEngine."""
    either = (False, True)
    engines = either if gpu and transformer_engine else (False,)
    ways = list(itertools.product(engines, either if gpu else (False,), either))
    if not MODELS[name].every_way:
        return [Case(name, "bfloat16", *way) for way in (ways[0], ways[-1])]
    found = [Case(name, "bfloat16", *way) for way in ways]
    return [*found, Case(name, "float32", engines[-1], False, False)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases, or one; returns the exit code."""
    return run_script("llm_beside_transformers.py", lambda: _run(_arguments(argv)))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("llm_beside_transformers.py", __doc__)
    add = parser.add_argument
    add("--json", type=Path, help="where the results go")
    only = "regular expression: models whose name has a match (default: all)"
    add("--only", default=".", help=only)
    add("--jobs", type=int, help="cases at the same time (default: cores - 2)")
    add("--seconds", type=float, default=150, help="a case that takes longer is ended")
    case = "measure this case in this process, MODEL/DTYPE[/transformer_engine][/graphs]"
    add("--case", help=case)
    add("--model", type=Path, help="with --case: folder of its model (default: made anew)")
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if args.model and not args.case:
        parser.error("--model needs --case")
    args.case = Case.of_name(args.case) if args.case else None
    args.names = [name for name in MODELS if re.search(args.only, name)]
    if not args.names:
        parser.error(f"--only must match one of {'; '.join(MODELS)}, got {args.only!r}")
    if args.json:
        require_writable(files={"--json": args.json})
    return args


def _run(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    if args.case:
        _run_case(args)
        return
    import torch

    on_gpu = torch.cuda.is_available()
    about = {
        **provenance.source(),
        "device": torch.cuda.get_device_name() if on_gpu else provenance.processor(),
        "versions": provenance.versions(_PACKAGES),
    }
    rows, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case, found in _results(args, Path(folder), on_gpu):
            if isinstance(found, str):
                failed.append(f"{case.name}: {found}")
                print(f"{case.name} failed", flush=True)
                continue
            rows += found
            for row in found:
                print(_line(row), flush=True)
    if args.json:
        write_json(args.json, {"environment": about, "rows": rows})
    failed += [f"{_line(row)}: {row['exceeded']}" for row in rows if row["exceeded"]]
    if failed:
        raise Failure("\n".join([f"{len(failed)} cases or rows:", *failed]))
    print(f"{len(rows)} rows, all within bf16's own error")


def _results(
    args: argparse.Namespace, folder: Path, on_gpu: bool
) -> Iterator[tuple[Case, list[dict] | str]]:
    """Cases with their rows, or with the end of what a process that failed has printed."""
    jobs = args.jobs or max(1, (os.cpu_count() or 1) - 2)
    with_engine = importlib.util.find_spec("transformer_engine") is not None
    waiting: list[tuple[Case, Future]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for number, name in enumerate(args.names):
            model = MODELS[name].write(folder / f"model{number}")
            for case in cases_of(name, gpu=on_gpu, transformer_engine=with_engine):
                report = folder / f"{number}-{len(waiting)}.json"
                future = pool.submit(_in_a_process, case, model, report, args.seconds)
                waiting.append((case, future))
        for case, future in waiting:
            yield case, future.result()


def _in_a_process(case: Case, model: Path, report: Path, seconds: float) -> list[dict] | str:
    words, log = ["--case", case.name, "--model", str(model)], report.with_suffix(".log")
    command = [sys.executable, __file__, *words, "--json", str(report)]
    code = run_to_log(command, log, seconds, {"TORCHINDUCTOR_COMPILE_THREADS": "1"})
    if code == 0:
        return json.loads(report.read_text())
    said = log.read_text(errors="replace").strip().splitlines()
    return "\n".join([*said, *([] if code else [f"ended after {seconds:.0f} s"])][-_LINES:])


def _line(row: dict) -> str:
    case = Case(*(row[name] for name in ("model", "dtype", *WAYS)))
    ways = "in a batch" if row["together"] else "alone"
    ours, theirs = (
        " ".join(f"{name} {one[name]:.2e}" for name in ("worst", "rms", "median"))
        for one in (row, row["transformers_bf16"])
    )
    head = f"{case.name}, {ways}: {ours} (transformers in bf16 {theirs})"
    return f"{head}, same tokens {row['same_choice']:.3f}"


def _run_case(args: argparse.Namespace) -> None:
    # Before anything is imported: LLM runs in this process, and finds what it may use.
    if not args.case.transformer_engine:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    import torch
    import torch.distributed as dist

    from absorbed_mla.cpu_host import enable_cpu_host

    enable_cpu_host()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or MODELS[args.case.model].write(Path(folder) / "model")
        rows = measure(args.case, model)
    if args.json:
        write_json(args.json, rows)
    for row in rows:
        print(_line(row))


def prompts() -> list[list[int]]:
    """Token ids; the last three begin equally."""
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(_VOCABULARY) for _ in range(count)]

    shared = tokens(_SHARED)
    return [*map(tokens, _OTHERS), *(shared + tokens(count) for count in _BEHIND)]


def measure(case: Case, folder: Path) -> list[dict]:
    """A row for the prompts one after the other, and one for all of them together.

    Args:
        case: What to run; the first of this process, because Megatron keeps what it finds of the
            first model's experts.
        folder: With the checkpoint of its model.
    """
    from absorbed_mla import LLM
    from tests.support.log_probs import written

    # Those of prompts have all of a prompt computed, outside of graphs of whole steps.
    of_prompts = not (case.prefix_cache or case.graphs)
    options = {
        "dtype": case.dtype,
        "max_num_seqs": 8,
        "enable_prefix_caching": case.prefix_cache,
        "cuda_graphs": case.graphs,
        "prompt_logprobs": of_prompts,
    }
    more = {"prompt_log_probs": of_prompts}
    with LLM(folder, **options) as llm:
        alone = [text for one in prompts() for text in written(llm, [one], NEW_TOKENS, **more)]
        together = written(llm, prompts(), NEW_TOKENS, **more)
        done = llm.statistics()
        llm.require_no_leak()
    assert bool(done.prefix_blocks) == case.prefix_cache, "equal beginnings were not found"
    assert bool(done.graph_steps) == case.graphs, "steps were not as asked for"
    return [
        {**asdict(case), "together": texts is together, **_errors(case, folder, texts)}
        for texts in (alone, together)
    ]


def _errors(case: Case, folder: Path, texts: list[Text]) -> dict:
    import torch

    from tests.support import log_probs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = [text.tokens for text in texts]
    expected, rounded = (
        log_probs.by_transformers(folder, tokens, dtype, device)
        for dtype in (torch.float32, torch.bfloat16)
    )
    found = log_probs.errors_of(texts, expected)
    theirs = log_probs.errors_of_transformers(texts, rounded, expected)
    last = [(a[-NEW_TOKENS:], b[-NEW_TOKENS:]) for a, b in zip(rounded, expected)]
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in last]).double().mean()
    routed = MODELS[case.model].experts
    factor = log_probs.ROUTED_FACTOR if routed else log_probs.FACTOR
    return {
        **asdict(found),
        "transformers_bf16": {**asdict(theirs), "same_choice": float(same)},
        "exceeded": log_probs.exceeded(found, theirs, factor),
    }


if __name__ == "__main__":
    leave(main())
