"""generate.py --cuda-graphs: what it refuses, and what it asks Megatron for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import InferenceCudaGraphScope

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

from generation.arguments import parse_arguments
from generation.cuda_graphs import check_graphs, engine_fields, model_fields
from training.model import build_config
from training.model_options import resolve_model

DENSE = ("--num-experts", "0")
SCOPES = InferenceCudaGraphScope


def parsed(*words: str, processes: int = 1):
    """Arguments of a command line and the model that they describe."""
    args = parse_arguments(["--load", "x", "--preset", "tiny", *words], processes)
    return args, resolve_model(args)


@pytest.fixture
def gpu(monkeypatch):
    """As far as the check looks."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--cuda-graphs needs a GPU"):
        check_graphs(*parsed("--cuda-graphs"))
    check_graphs(*parsed("--form", "expanded"))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--form", "expanded"), "--form auto or absorbed, got expanded"),
        (("--moe-token-dispatcher-type", "allgather"), "alltoall, got allgather"),
    ],
)
def test_refused(gpu, words, error):
    with pytest.raises(ValueError, match=error):
        check_graphs(*parsed("--cuda-graphs", *words))


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ((), 1),
        (("--sequence-parallel",), 2),
        (("--batch-invariant", "--bf16", "--form", "absorbed"), 2),
        # There are no tokens to dispatch.
        ((*DENSE, "--moe-token-dispatcher-type", "allgather"), 1),
    ],
)
def test_accepted(gpu, words, processes):
    check_graphs(*parsed("--cuda-graphs", *words, processes=processes))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("none", SCOPES.none, False)),
        (("--cuda-graphs",), ("local", SCOPES.layer, True)),
        (("--cuda-graphs", *DENSE), ("local", SCOPES.layer, False)),
    ],
)
def test_config(words, expected):
    args, model = parsed(*words)
    config = build_config(args, model, torch.device("cpu"), **model_fields(args, model))
    padded = config.moe_pad_experts_for_cuda_graph_inference
    assert (config.cuda_graph_impl, config.inference_cuda_graph_scope, padded) == expected
    engine = engine_fields(args, config)
    if args.cuda_graphs:
        assert engine["num_cuda_graphs"] == 16
        assert engine["use_cuda_graphs_for_non_decode_steps"] is not padded
    else:
        assert not engine
