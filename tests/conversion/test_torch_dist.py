"""Distributed checkpoints: written, read back, and what else is in their folder."""

import dataclasses
import json
import threading

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed import checkpoint as dcp

from checkpoint_conversion.checkpoint_folder import kind_of
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from checkpoint_conversion.formats.torch_dist_writer import TorchDistWriter, _without_checksums
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import (
    CONFIGS,
    assert_same_tensors,
    in_memory,
    lazy,
    random_tensors,
    read_torch_dist,
    refused,
    tensor_checksum,
    tiny_config,
    write_lazy,
    write_torch_dist,
)

KV_UP = "decoder.layers.0.self_attention.linear_kv_up_proj.weight"


@pytest.mark.parametrize("name", ["dense", "mtp", "v2_lite"])
def test_the_arguments_alone_say_what_the_model_is(tmp_path, name):
    config = tiny_config(**CONFIGS[name])
    tensors = random_tensors(config)
    write_torch_dist(tmp_path, config, tensors)
    (tmp_path / "release/hugging_face/config.json").unlink()
    assert TorchDistCheckpoint(tmp_path).config == config
    assert_same_tensors(read_torch_dist(tmp_path), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_kept(tmp_path, config, dtype):
    tensors = random_tensors(config, dtype)
    write_torch_dist(tmp_path, config, tensors)
    assert_same_tensors(read_torch_dist(tmp_path), tensors)
    common = dist_checkpointing.load_common_state_dict(tmp_path / "release")
    assert common["args"].params_dtype == dtype


def test_the_folder_is_megatrons(tmp_path, config, tensors):
    write_torch_dist(tmp_path, config, tensors, iteration=7, norms="separate")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "7"
    inner = tmp_path / "iter_0000007"
    # Nothing says where it was written.
    assert str(tmp_path).encode() not in (inner / ".metadata").read_bytes()
    names = {path.name for path in inner.iterdir() if path.suffix != ".distcp"}
    assert names == {".metadata", "common.pt", "metadata.json", "hugging_face"}
    assert dist_checkpointing.check_is_distributed_checkpoint(str(inner))
    common = dist_checkpointing.load_common_state_dict(inner)
    assert (common["iteration"], common["checkpoint_version"]) == (7, 3.0)
    assert common["args"].ckpt_format == "torch_dist"
    assert common["args"].transformer_impl == "local"
    assert dist_checkpointing.load_content_metadata(inner)["non_homogeneous_layers"] is True
    for folder in (tmp_path, inner):
        assert kind_of(folder) == "torch_dist"
        assert_same_tensors(read_torch_dist(folder), tensors)


@pytest.mark.parametrize("name", ["dense", "all_moe"])
def test_the_arguments_agree_with_the_layers(tmp_path, name):
    """Megatron asks for numbered layers where moe_layer_freq is a list."""
    config = tiny_config(**CONFIGS[name])
    write_torch_dist(tmp_path, config, random_tensors(config), layers="stacked")
    common = dist_checkpointing.load_common_state_dict(tmp_path / "release")
    assert not isinstance(common["args"].moe_layer_freq, list)
    assert common["content_metadata"]["non_homogeneous_layers"] is False


def test_layers_are_stacked_where_megatron_stacks_them():
    layers = {
        name: TorchDistWriter(tiny_config(**changes), TargetOptions()).layout()["layers"]
        for name, changes in CONFIGS.items()
    }
    assert layers.pop("dense") == "stacked"
    assert set(layers.values()) == {"numbered"}


def test_records_of_parts(tmp_path, config, tensors):
    """Names, offsets, shapes and checksums are those of what torch loads."""
    results = write_torch_dist(tmp_path, config, tensors, "absorbed")
    reader = dcp.FileSystemReader(tmp_path / "release")
    metadata = reader.read_metadata()
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    seen = set()
    for number, result in enumerate(results):
        (name,) = result.files
        assert name == f"release/__{number}_0.distcp" == f"release/{result.name}"
        assert (tmp_path / name).stat().st_size == result.files[name]
        for record in result.tensors:
            values = state[record.key]
            for dim, size in enumerate(record.shape):
                values = values.narrow(dim, (record.offset or [0] * values.dim())[dim], size)
            assert record.checksum == tensor_checksum(values), record.key
            assert f"torch.{record.dtype}" == str(values.dtype)
            assert record.file == name
            seen.add(record.key)
    assert seen == set(state)
    assert json.dumps([dataclasses.asdict(result) for result in results])


def test_parts_are_bounded_and_planned_alike_every_time(config, tensors):
    plans = []
    for part_bytes, limit in ((1 << 13, None), (1 << 13, None), (1 << 20, 1 << 13)):
        writer = TorchDistWriter(config, TargetOptions(max_shard_bytes=limit))
        plans.append(writer.plan(in_memory(tensors), part_bytes))
    summaries = [
        [(part.name, [(e.key, e.offset) for e in part.entries], part.peak) for part in plan]
        for plan in plans
    ]
    assert summaries[0] == summaries[1] == summaries[2]
    for part in plans[0]:
        # The halves of a gated weight stay together.
        alone = len({entry.key for entry in part.entries}) == 1
        assert alone or sum(entry.tensor.nbytes for entry in part.entries) <= 1 << 13


def test_what_cannot_be_read_in_parts_is_read_once(tmp_path, config, tensors):
    """All row blocks of an absorbed model's K/V up-projection are cut from one tensor."""
    loads = []

    def counted(name, tensor):
        load = lambda session: loads.append(name) or tensor  # noqa: E731
        return dataclasses.replace(lazy(name, tensor), load=load)

    whole = {name: counted(name, tensor) for name, tensor in tensors.items()}
    write_lazy(tmp_path, config, whole, "absorbed")
    assert sorted(loads) == sorted(tensors)
    assert_same_tensors(read_torch_dist(tmp_path), tensors)


def test_only_what_is_asked_for_is_read(tmp_path, config, tensors):
    """Of the chunks of a tensor, those that overlap a part of it."""
    write_torch_dist(tmp_path, config, tensors, "absorbed", layers="numbered")
    stored = TorchDistCheckpoint(tmp_path).stored[KV_UP]
    # Blocks of gcd(12, 20) rows.
    for start, length, chunks in ((0, 4, 1), (3, 2, 2), (4, 12, 3), (0, 128, 32)):
        with ReadSession() as session:
            part = stored.narrow(0, start, length)
            found = part.load(session)
            assert len(session._made) == chunks
        expected = tensors["model.layers.0.self_attn.kv_b_proj.weight"][start : start + length]
        assert torch.equal(found, expected)
        assert part.peak <= 2 * part.nbytes + 4 * 24 * 2
    with ReadSession() as session:
        inner = stored.narrow(0, 4, 20).narrow(0, 2, 7).narrow(1, 5, 3).load(session)
    assert torch.equal(inner, tensors["model.layers.0.self_attn.kv_b_proj.weight"][6:13, 5:8])


def test_one_stored_tensor_has_one_dtype(config, tensors):
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name] = tensors[name].float()
    with refused("experts.experts.linear_fc2.weight would be"):
        TorchDistWriter(config, TargetOptions()).plan(in_memory(tensors), 1 << 20)


def test_padding_is_dropped_and_said(tmp_path, config, tensors):
    write_torch_dist(tmp_path, config, tensors, vocab_multiple=48)
    checkpoint = TorchDistCheckpoint(tmp_path)
    assert checkpoint.stored["output_layer.weight"].shape[0] == 96
    assert checkpoint.notes == ["32 rows of padding after the vocabulary are dropped"]
    common = dist_checkpointing.load_common_state_dict(tmp_path / "release")
    assert common["args"].padded_vocab_size == 96
    assert common["args"].make_vocab_size_divisible_by == 48


@pytest.mark.parametrize(
    ("to", "options", "words"),
    [
        ("megatron", {"fp8": "float"}, ["--fp8 float"]),
        ("megatron", {"layers": "stacked"}, ["--layers stacked"]),
        ("absorbed", {"kv_up": "split", "down": "fused"}, ["--kv-up split", "--down fused"]),
    ],
)
def test_options_that_it_cannot_honour(config, to, options, words):
    with refused(f"--to {to} cannot", *words, problems=len(words)):
        TorchDistWriter(config, TargetOptions(**options), to)


def test_the_checksum_setting_is_restored():
    """Whatever the order in which threads begin and end."""
    before = torch.serialization.get_crc32_options()
    first, second = threading.Event(), threading.Event()

    def other():
        with _without_checksums():
            assert torch.serialization.get_crc32_options() is False
            first.set()
            second.wait(10)

    thread = threading.Thread(target=other)
    with _without_checksums():
        thread.start()
        first.wait(10)
        assert torch.serialization.get_crc32_options() is False
    second.set()
    thread.join()
    assert torch.serialization.get_crc32_options() is before is True
