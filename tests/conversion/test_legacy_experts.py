"""Routed experts in per-rank files: every module Megatron had for them, and expert parallelism."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from torch.nn.functional import silu

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from tests.conversion.legacy_support import (
    change_rank,
    load_rank,
    read_legacy,
    save_rank,
    write_legacy,
)
from tests.conversion.support import assert_same_tensors, random_tensors

EXPERTS, HIDDEN, WIDTH = 4, 32, 16
LOCAL = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.linear_fc([12])\.weight")


def to_grouped_mlp(content):
    """Replace sequential experts by the two parameters of the former GroupedMLP."""
    experts: dict[str, list] = {}
    for name in list(content["model"]):
        match = LOCAL.fullmatch(name)
        if match:
            module, number = match[1], match[3]
            experts.setdefault(f"{module}weight{number}", []).append(content["model"].pop(name))
    for name, weights in experts.items():
        transposed = torch.stack([weight.t() for weight in weights])
        shape = (HIDDEN, -1) if name.endswith("1") else (-1, HIDDEN)
        content["model"][name] = transposed.contiguous().view(shape)


def split_expert_ranks(inner, ranks):
    """Turn files of one expert-parallel rank each into those of several."""
    for folder in list(inner.glob("mp_rank_*")):
        content = load_rank(folder)
        content["args"].expert_model_parallel_size = ranks
        each = EXPERTS // ranks
        for rank in range(ranks):
            model = {}
            for name, value in content["model"].items():
                match = re.fullmatch(r"(.*local_experts\.)(\d+)(\..*)", name)
                if match is None:
                    model[name] = value
                elif int(match[2]) // each == rank:
                    model[f"{match[1]}{int(match[2]) % each}{match[3]}"] = value
            save_rank(inner / f"{folder.name}_{rank:03d}", content | {"model": model})
        shutil.rmtree(folder)


@pytest.mark.parametrize("size", [1, 2])
def test_former_grouped_mlp(tmp_path, config, tensors, size):
    write_legacy(tmp_path, config, tensors, tensor_parallel=size)
    for rank in range(size):
        change_rank(tmp_path / f"release/mp_rank_0{rank}", to_grouped_mlp)
    checkpoint = LegacyCheckpoint(tmp_path)
    assert checkpoint.layout["experts"] == "GroupedMLP"
    assert_same_tensors(read_legacy(tmp_path), tensors)
    used = [tensor.leaves for tensor in checkpoint.hugging_face_tensors().values()]
    assert frozenset().union(*used) == set(checkpoint.stored)


def test_former_grouped_mlp_computes_what_the_experts_do(tmp_path, config):
    """Its products, as its forward pass had them: rows of tokens times weights as they lie."""
    tensors = random_tensors(config, torch.float64)
    write_legacy(tmp_path, config, tensors)
    inner = tmp_path / "release/mp_rank_00"
    change_rank(inner, to_grouped_mlp)
    found = read_legacy(tmp_path)
    model = load_rank(inner)["model"]
    w1 = model["decoder.layers.2.mlp.experts.weight1"].view(EXPERTS, HIDDEN, -1)
    w2 = model["decoder.layers.2.mlp.experts.weight2"].view(EXPERTS, -1, HIDDEN)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        gate, up = (x @ w1[expert]).chunk(2, dim=-1)
        expected = (silu(gate) * up) @ w2[expert]
        name = f"model.layers.2.mlp.experts.{expert}."
        gate, up, down = (found[f"{name}{n}_proj.weight"] for n in ("gate", "up", "down"))
        actual = (silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-9)


def test_one_expert_of_a_grouped_mlp_is_read_alone(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors)
    change_rank(tmp_path / "release/mp_rank_00", to_grouped_mlp)
    lazy = LegacyCheckpoint(tmp_path).hugging_face_tensors()
    down = lazy["model.layers.1.mlp.experts.2.down_proj.weight"]
    assert down.nbytes == 2 * HIDDEN * WIDTH
    # The stored block and its transpose.
    assert down.peak <= 2 * down.nbytes


def test_a_grouped_mlp_of_other_experts(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors)
    change_rank(tmp_path / "release/mp_rank_00", to_grouped_mlp)

    def cut(content):
        name = "decoder.layers.1.mlp.experts.weight1"
        content["model"][name] = content["model"][name][:, :99].clone()

    change_rank(tmp_path / "release/mp_rank_00", cut)
    with pytest.raises(CheckpointError) as error:
        LegacyCheckpoint(tmp_path).hugging_face_tensors()
    assert "(32, 99), which is not that of 4 experts" in error.value.problems[0]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2, "pipeline_parallel": 3}])
def test_expert_parallel_ranks(tmp_path, config, tensors, ranks, options):
    write_legacy(tmp_path, config, tensors, **options)
    split_expert_ranks(tmp_path / "release", ranks)
    checkpoint = LegacyCheckpoint(tmp_path)
    assert checkpoint.layout["expert_parallel"] == ranks
    assert_same_tensors(read_legacy(tmp_path), tensors)
    used = [tensor.leaves for tensor in checkpoint.hugging_face_tensors().values()]
    assert frozenset().union(*used) == set(checkpoint.stored)


class TestExpertParallelRanksThatDoNotFit:
    @pytest.fixture
    def inner(self, tmp_path, config, tensors):
        write_legacy(tmp_path, config, tensors, tensor_parallel=2)
        split_expert_ranks(tmp_path / "release", 2)
        return tmp_path / "release"

    def test_what_all_of_them_hold_differs(self, inner):
        """Attention is the same on every expert-parallel rank."""

        def change(content):
            name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
            content["model"][name][3, 3] += 1

        change_rank(inner / "mp_rank_01_001", change)
        with pytest.raises(CheckpointError, match=r"linear_q_up_proj.*copies of one weight"):
            read_legacy(inner.parent)

    def test_one_has_too_few(self, inner):
        name = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
        change_rank(inner / "mp_rank_00_001", lambda content: content["model"].pop(name))
        with pytest.raises(CheckpointError) as error:
            LegacyCheckpoint(inner.parent).hugging_face_tensors()
        (problem,) = error.value.problems
        assert problem.startswith(f"{name} is missing in mp_rank_00_001;")

    def test_experts_do_not_divide(self, inner):
        for folder in inner.glob("mp_rank_*"):
            change_rank(
                folder, lambda content: setattr(content["args"], "expert_model_parallel_size", 3)
            )
        for tensor in range(2):
            shutil.copytree(inner / f"mp_rank_0{tensor}_001", inner / f"mp_rank_0{tensor}_002")
        with pytest.raises(CheckpointError) as error:
            LegacyCheckpoint(inner.parent)
        assert error.value.problems == ("4 experts cannot be shared by 3 expert-parallel ranks",)
