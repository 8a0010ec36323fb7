"""Per-rank checkpoints are read: every model, layout, grid of ranks and module of experts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from checkpoint_conversion.checkpoint_folder import kind_of
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.mapping import hugging_face_shapes
from tests.conversion.legacy_support import (
    change_rank,
    load_rank,
    only_args_config,
    read_legacy,
    save_rank,
    write_legacy,
)
from tests.conversion.support import (
    CONFIGS,
    NO_FUSED_DOWN,
    assert_same_tensors,
    random_tensors,
    refused,
    tiny_config,
)
from tests.support.combinations import thinned

EXPERTS, HIDDEN, WIDTH = 4, 32, 16
LOCAL = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.linear_fc([12])\.weight")
LAYOUTS = {
    "plain": {},
    "tp": {"tensor_parallel": 2},
    "tp x pp": {"tensor_parallel": 2, "pipeline_parallel": 3, "iteration": 100},
    "local": {"norms": "separate", "cut_down": True, "tensor_parallel": 2, "experts": "grouped"},
    "split": {"kv_up": "split", "tensor_parallel": 4, "cut_down": True},
    "fused down": {"down": "fused", "tensor_parallel": 2, "pipeline_parallel": 3},
    "fused down, cut": {"down": "fused", "cut_down": True, "tensor_parallel": 4},
}


def checked(folder, config, tensors, **layout) -> LegacyCheckpoint:
    """Every tensor comes back, of every stored one something is used, and the layout is said."""
    checkpoint = LegacyCheckpoint(folder)
    assert_same_tensors(read_legacy(folder), tensors)
    assert checkpoint.config == config
    expected = {"norms": "fused", "kv_up": "combined", "down": "separate"}
    expected |= {"experts": "sequential"} if config.num_experts else {}
    expected |= {"tensor_parallel": 1, "pipeline_parallel": 1}
    known = {*expected, "iteration", "expert_parallel"}
    assert checkpoint.layout == expected | {k: v for k, v in layout.items() if k in known}
    used = [tensor.leaves for tensor in checkpoint.hugging_face_tensors().values()]
    assert frozenset().union(*used) == set(checkpoint.stored)
    return checkpoint


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in CONFIGS
        for layout in LAYOUTS
        if ("fused down" not in layout or name not in NO_FUSED_DOWN)
        and (name == "v3" or layout in ("tp x pp", "local") or not thinned())
    ],
)
def test_every_model_and_layout_comes_back(tmp_path, name, layout):
    config = tiny_config(**CONFIGS[name])
    tensors = random_tensors(config)
    write_legacy(tmp_path, config, tensors, **LAYOUTS[layout])
    checked(tmp_path, config, tensors, **LAYOUTS[layout])


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


class TestExperts:
    """Every module that Megatron had for routed experts, and expert parallelism."""

    @pytest.mark.parametrize("size", [1, 2])
    def test_former_grouped_mlp(self, tmp_path, config, tensors, size):
        write_legacy(tmp_path, config, tensors, tensor_parallel=size)
        for rank in range(size):
            change_rank(tmp_path / f"release/mp_rank_0{rank}", to_grouped_mlp)
        checked(tmp_path, config, tensors, tensor_parallel=size, experts="GroupedMLP")

    @pytest.mark.parametrize("ranks", [2, 4])
    @pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2, "pipeline_parallel": 3}])
    def test_expert_parallel_ranks(self, tmp_path, config, tensors, ranks, options):
        write_legacy(tmp_path, config, tensors, **options)
        split_expert_ranks(tmp_path / "release", ranks)
        checked(tmp_path, config, tensors, expert_parallel=ranks, **options)

    @pytest.fixture
    def grouped(self, tmp_path, config):
        """One rank's folder with a GroupedMLP, and the tensors."""
        tensors = random_tensors(config, torch.float64)
        write_legacy(tmp_path, config, tensors)
        change_rank(tmp_path / "release/mp_rank_00", to_grouped_mlp)
        return tmp_path / "release/mp_rank_00"

    def test_former_grouped_mlp_computes_what_the_experts_do(self, tmp_path, grouped):
        """Its products, as its forward pass had them: rows of tokens times weights as they lie."""
        found, model = read_legacy(tmp_path), load_rank(grouped)["model"]
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

    def test_one_expert_of_a_grouped_mlp_is_read_alone(self, tmp_path, grouped):
        lazy = LegacyCheckpoint(tmp_path).hugging_face_tensors()
        down = lazy["model.layers.1.mlp.experts.2.down_proj.weight"]
        assert down.nbytes == 8 * HIDDEN * WIDTH
        # The stored block and its transpose.
        assert down.peak <= 2 * down.nbytes

    def test_a_grouped_mlp_of_other_experts(self, tmp_path, grouped):
        def cut(content):
            name = "decoder.layers.1.mlp.experts.weight1"
            content["model"][name] = content["model"][name][:, :99].clone()

        change_rank(grouped, cut)
        with refused("(32, 99), which is not that of 4 experts"):
            LegacyCheckpoint(tmp_path).hugging_face_tensors()


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
        with refused("linear_q_up_proj", "copies of one weight"):
            read_legacy(inner.parent)

    def test_one_has_too_few(self, inner):
        name = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
        change_rank(inner / "mp_rank_00_001", lambda content: content["model"].pop(name))
        with refused(f"\n  {name} is missing in mp_rank_00_001;", problems=1):
            LegacyCheckpoint(inner.parent).hugging_face_tensors()

    def test_experts_do_not_divide(self, inner):
        for folder in inner.glob("mp_rank_*"):
            change_rank(
                folder, lambda content: setattr(content["args"], "expert_model_parallel_size", 3)
            )
        for tensor in range(2):
            shutil.copytree(inner / f"mp_rank_0{tensor}_001", inner / f"mp_rank_0{tensor}_002")
        with refused("\n  4 experts cannot be shared by 3 expert-parallel ranks", problems=1):
            LegacyCheckpoint(inner.parent)


def test_either_folder_can_be_given(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors, tensor_parallel=2, pipeline_parallel=3, iteration=7)
    for folder in (tmp_path, tmp_path / "iter_0000007"):
        assert kind_of(folder) == "legacy"
        assert LegacyCheckpoint(folder).layout["iteration"] == 7
        assert_same_tensors(read_legacy(folder), tensors)


def test_the_config_is_also_in_the_args(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors, tensor_parallel=2)
    assert LegacyCheckpoint(tmp_path).config == config
    only_args_config(tmp_path)
    assert LegacyCheckpoint(tmp_path).config == config
    for rank in ("mp_rank_00", "mp_rank_01"):
        change_rank(tmp_path / "release" / rank, lambda content: content.pop("args"))
    with refused("--hf-config"):
        LegacyCheckpoint(tmp_path)
    hf_config = tmp_path / "config.json"
    hf_config.write_text(json.dumps(config.hugging_face))
    assert LegacyCheckpoint(tmp_path, hf_config=hf_config).config == config


def test_padding_of_the_vocabulary_is_dropped(tmp_path):
    """Megatron refuses a table whose rows do not divide, and pads it with zeros."""
    config = tiny_config(vocab_size=61)
    tensors = random_tensors(config)
    write_legacy(tmp_path, config, tensors, tensor_parallel=2, vocab_multiple=3)
    model = load_rank(tmp_path / "release/mp_rank_01")["model"]
    assert model["output_layer.weight"].shape[0] == 33
    found = checked(tmp_path, config, tensors, tensor_parallel=2)
    assert found.notes == ["5 rows of padding after the vocabulary are dropped"]


class TestCopies:
    """What several ranks hold must be the same everywhere."""

    @pytest.fixture
    def folder(self, tmp_path, config, tensors):
        write_legacy(tmp_path, config, tensors, tensor_parallel=2)
        return tmp_path

    def read_with(self, folder, rank, name):
        """Read after one value of a tensor was changed by a little."""

        def change(content):
            content["model"][name].view(-1)[3] *= 1.01

        change_rank(folder / "release" / rank, change)
        return read_legacy(folder)

    @pytest.mark.parametrize(
        "name",
        [
            "decoder.final_layernorm.weight",
            "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
            "decoder.layers.1.mlp.router.weight",
        ],
    )
    def test_of_tensor_parallel_ranks(self, folder, name):
        with refused("mp_rank_0", "differs between tensor-parallel"):
            self.read_with(folder, "mp_rank_01", name)

    def test_what_is_no_copy_may_differ(self, folder, tensors):
        name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
        found = self.read_with(folder, "mp_rank_01", name)
        changed = {key for key in tensors if not torch.equal(found[key], tensors[key])}
        assert changed == {"model.layers.0.self_attn.q_b_proj.weight"}

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"tie_word_embeddings": True}, "output_layer.weight"),
            ({"num_nextn_predict_layers": 1}, "embedding.word_embeddings.weight"),
        ],
    )
    def test_of_the_embedding_on_the_last_stage(self, tmp_path, changes, name):
        config = tiny_config(**changes)
        write_legacy(tmp_path, config, random_tensors(config), pipeline_parallel=3)
        assert name in load_rank(tmp_path / "release/mp_rank_00_002")["model"]
        with refused("copies of one weight, but differ"):
            self.read_with(tmp_path, "mp_rank_00_002", name)

    def test_need_not_be_on_the_last_stage(self, tmp_path):
        """They say nothing that the first stage does not say."""
        config = tiny_config(tie_word_embeddings=True)
        tensors = random_tensors(config)
        write_legacy(tmp_path, config, tensors, pipeline_parallel=3)
        last = tmp_path / "release/mp_rank_00_002"
        change_rank(last, lambda content: content["model"].pop("output_layer.weight"))
        assert_same_tensors(read_legacy(tmp_path), tensors)


@pytest.mark.parametrize(("mtp_layers", "early", "late"), [(0, 0, 1), (1, 1, 2)])
def test_stages_of_unequal_length(tmp_path, mtp_layers, early, late):
    """Megatron can give stages fewer layers, or MTP layers a stage of their own.

    The final norm then stays with the decoder's last layer.
    """
    config = tiny_config(num_nextn_predict_layers=mtp_layers)
    tensors = random_tensors(config)
    write_legacy(tmp_path, config, tensors, pipeline_parallel=3)
    folders = [tmp_path / f"release/mp_rank_00_00{i}" for i in (early, late)]
    first, second = map(load_rank, folders)
    for name in list(second["model"]):
        if name.startswith("decoder."):
            moved = name.replace("decoder.layers.0.", "decoder.layers.1.")
            first["model"][moved] = second["model"].pop(name)
    save_rank(folders[0], first)
    save_rank(folders[1], second)
    assert_same_tensors(read_legacy(tmp_path), tensors)


def test_older_names_of_mtp_layers(tmp_path):
    config = tiny_config(num_nextn_predict_layers=1)
    tensors = random_tensors(config)
    write_legacy(tmp_path, config, tensors)

    def rename(content):
        content["model"] = {
            name.replace("mtp_model_layer", "transformer_layer"): value
            for name, value in content["model"].items()
        }

    change_rank(tmp_path / "release/mp_rank_00", rename)
    assert_same_tensors(read_legacy(tmp_path), tensors)


def test_what_is_no_weight_is_left_alone(tmp_path, config, tensors):
    """Optimizer, random and FP8 states are named, with their bytes."""
    write_legacy(tmp_path, config, tensors)
    inner = tmp_path / "release/mp_rank_00"
    module = "decoder.layers.0.self_attention.linear_proj._extra_state"

    def add(content):
        moment = torch.zeros(10, 10)
        content["optimizer"] = {"state": [moment, {"same": moment}, (torch.zeros(3),)], "step": 3}
        content["rng_state"] = [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]
        content["opt_param_scheduler"] = {"lr": 0.1}
        content["optimizer"]["itself"] = content["optimizer"]
        content["model"][module] = torch.zeros(100, dtype=torch.uint8)
        content["model"]["output_layer._extra_state"] = torch.zeros(0, dtype=torch.uint8)

    change_rank(inner, add)
    (inner / "distrib_optim.pt").write_bytes(bytes(50))
    checkpoint = LegacyCheckpoint(tmp_path)
    assert checkpoint.left_alone == {
        "mp_rank_00/optimizer": 412,
        "mp_rank_00/rng_state": 8,
        "mp_rank_00/opt_param_scheduler": 0,
        f"mp_rank_00/{module}": 100,
        "mp_rank_00/distrib_optim.pt": 50,
    }
    assert any("FP8 states" in note and module in note for note in checkpoint.notes)
    assert_same_tensors(read_legacy(tmp_path), tensors)


ROOT = Path(__file__).parents[2]
MB = 1 << 20
# Reads a small and a large checkpoint; prints by how much the large one made the process grow.
SCRIPT = """
import sys
from pathlib import Path

from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import PeakMemory

def read(name):
    memory = PeakMemory()
    for tensor in LegacyCheckpoint(Path(sys.argv[1], name)).hugging_face_tensors().values():
        with ReadSession() as session:
            assert tensor.load(session).float().mean() == 1
    return memory.growth

read("small")
print(read("large"))
"""
LARGE = {"num_hidden_layers": 5, "hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 4096}


def write_ones(folder: Path, **dimensions: int) -> None:
    config = tiny_config(q_lora_rank=512, kv_lora_rank=256, n_routed_experts=None, **dimensions)
    shapes = hugging_face_shapes(config)
    ones = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    write_legacy(folder, config, ones, tensor_parallel=2)


def test_memory_follows_the_largest_tensor(tmp_path):
    """Not the file, which may be far larger than the memory of the machines that this is for."""
    # A fixed threshold, so that the C library gives freed blocks back: else what it keeps for later
    # counts too, and differs by tens of MB from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    write_ones(tmp_path / "small", num_hidden_layers=1)
    write_ones(tmp_path / "large", **LARGE)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = [path.stat().st_size for path in (tmp_path / "large").rglob("*.pt")]
    assert len(sizes) == 2
    assert min(sizes) > 120 * MB
    # The largest tensor has 16 MB.
    assert int(done.stdout) < 60 * MB, f"{int(done.stdout) / MB:.0f} MB"
