"""Writing Hugging Face checkpoints: shards, index, config.json, FP8, and what is refused."""

import dataclasses
import json
import os
import resource
import stat

import pytest
import torch
from safetensors import safe_open

from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint, HuggingFaceWriter
from checkpoint_conversion.formats.safetensors_file import write_tensors
from checkpoint_conversion.fp8 import quantise
from checkpoint_conversion.lazy_tensor import ReadSession
from checkpoint_conversion.manifest import tensor_record
from checkpoint_conversion.mapping import (
    hugging_face_shapes,
    rows_by_name,
    to_hugging_face,
    to_megatron,
)
from tests.conversion.support import (
    CONFIGS,
    INDEX,
    assert_same_tensors,
    in_memory,
    load_all,
    random_tensors,
    refused,
    rewritten,
    tensor_checksum,
    tiny_config,
    write_hugging_face,
    write_model,
    write_with,
)


@pytest.fixture
def source(tmp_path):
    write_model(tmp_path / "source", **CONFIGS["mtp"])
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return HuggingFaceCheckpoint(tmp_path / "source")


def test_tensors_that_share_memory(tmp_path):
    """Of Megatron's tensors some become two of Hugging Face's, which safetensors would refuse."""
    config = tiny_config(**CONFIGS["mtp"])
    tensors = random_tensors(config)
    pivot = to_hugging_face(to_megatron(in_memory(tensors), config), config)
    (tmp_path / "b").mkdir()
    writer = HuggingFaceWriter(config, TargetOptions())
    assert len(write_with(writer, tmp_path / "b", pivot, 1 << 30)) == 1
    back = HuggingFaceCheckpoint(tmp_path / "b")
    assert_same_tensors(load_all(back.hugging_face_tensors()), tensors)


class TestShards:
    @pytest.mark.parametrize(
        ("part_bytes", "most"), [(9000, None), (1 << 20, 9000), (9000, 1 << 20)]
    )
    def test_in_order_and_within_the_bound(self, tmp_path, source, part_bytes, most):
        options = TargetOptions(max_shard_bytes=most)
        _, results = rewritten(source, tmp_path / "b", options, part_bytes)
        order = [record.key for result in results for record in result.tensors]
        assert order == list(hugging_face_shapes(source.config))
        count = len(results)
        assert count > 10
        for i, result in enumerate(results, 1):
            assert result.name == f"model-{i:05d}-of-{count:05d}.safetensors"
            size = (tmp_path / "b" / result.name).stat().st_size
            assert result.files == {result.name: size}
            assert size <= 9000
        # As full as they can be.
        sizes = [next(iter(result.files.values())) for result in results]
        assert sum(sizes) / count > 5000

    def test_one_tensor_above_the_bound_is_alone(self, tmp_path, source):
        _, results = rewritten(source, tmp_path / "b", TargetOptions(max_shard_bytes=1))
        assert all(len(result.tensors) == 1 for result in results)

    def test_the_plan_is_always_the_same(self, source):
        plans = []
        for _ in range(2):
            writer = HuggingFaceWriter(source.config, TargetOptions(fp8="float"))
            parts = writer.plan(source.hugging_face_tensors(), 9000)
            plans.append([(part.name, [e.key for e in part.entries]) for part in parts])
        assert plans[0] == plans[1]

    def test_records(self, tmp_path, source):
        _, results = rewritten(source, tmp_path / "b")
        index = json.loads((tmp_path / "b" / INDEX).read_text())
        json.dumps([dataclasses.asdict(result) for result in results])
        records = {r.key: (r, result.name) for result in results for r in result.tensors}
        assert index["weight_map"] == {key: name for key, (_, name) in records.items()}
        tensors = load_all(source.hugging_face_tensors())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        for name, tensor in tensors.items():
            assert records[name][0] == tensor_record(name, tensor, records[name][1])
            assert records[name][0].checksum == tensor_checksum(tensor)
        with safe_open(tmp_path / "b" / results[0].name, "pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_progress_and_peak(self, tmp_path, source):
        writer = HuggingFaceWriter(source.config, TargetOptions())
        seen: list[int] = []
        for part in writer.plan(source.hugging_face_tensors(), 20_000):
            assert part.peak >= part.nbytes
            with ReadSession() as session:
                writer.write_part(tmp_path, part, session, seen.append)
        tensors = source.hugging_face_tensors()
        entries = [entry for part in writer.plan(tensors, 20_000) for entry in part.entries]
        assert seen == [entry.tensor.nbytes for entry in entries]
        assert sum(seen) == sum(tensor.nbytes for tensor in tensors.values())


class TestOtherFiles:
    def test_auxiliary(self, tmp_path, source):
        source.auxiliary["config.json"].write_text('{"theirs": true}')
        stolen = {"model-00001-of-00001.safetensors": source.auxiliary["tokenizer.json"]}
        source.auxiliary = {**source.auxiliary, **stolen, INDEX: stolen.copy().popitem()[1]}
        rewritten(source, tmp_path / "b")
        assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
        config = json.loads((tmp_path / "b" / "config.json").read_text())
        assert config == source.config.hugging_face
        assert HuggingFaceCheckpoint(tmp_path / "b").stored.keys() == source.stored.keys()

    def test_config_says_what_was_written(self, tmp_path, source):
        rewritten(source, tmp_path / "b", TargetOptions(fp8="ue8m0"))
        quantised = HuggingFaceCheckpoint(tmp_path / "b")
        assert "ue8m0 scales" in quantised.config.quantisation
        assert quantised.config.dtype == torch.bfloat16
        # And without it again; the dtype that FP8 is dequantised to becomes the model's.
        rewritten(quantised, tmp_path / "c", TargetOptions(dtype=torch.float32))
        plain = HuggingFaceCheckpoint(tmp_path / "c")
        assert plain.config.quantisation is None
        assert plain.config.dtype == torch.float32
        assert plain.notes == []

    def test_mtp_layers_that_are_not_there(self, tmp_path, tensors):
        write_hugging_face(tmp_path / "a", tiny_config(**CONFIGS["mtp"]), tensors)
        rewritten(HuggingFaceCheckpoint(tmp_path / "a"), tmp_path / "b")
        back = HuggingFaceCheckpoint(tmp_path / "b")
        assert back.config.hugging_face["num_nextn_predict_layers"] == 0
        assert back.notes == []

    def test_files_have_the_usual_mode(self, tmp_path, source):
        rewritten(source, tmp_path / "b")
        (tmp_path / "usual").touch()
        usual = stat.S_IMODE((tmp_path / "usual").stat().st_mode)
        for file in (tmp_path / "b").iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == usual, file


class TestFp8:
    @pytest.mark.parametrize("scales", ["float", "ue8m0"])
    def test_quantised_when_written(self, tmp_path, scales):
        config = tiny_config(hidden_size=300, kv_lora_rank=150)
        tensors = random_tensors(config)
        write_hugging_face(tmp_path / "a", config, tensors)
        source = HuggingFaceCheckpoint(tmp_path / "a")
        options = TargetOptions(fp8=scales)
        writer, results = rewritten(source, tmp_path / "b", options, part_bytes=60_000)
        assert len(results) > 3
        back = HuggingFaceCheckpoint(tmp_path / "b")
        assert back.layout == writer.layout()
        assert f"{scales} scales" in str(back.layout["quantisation"])
        assert back.notes == []
        stored = load_all(dict(back.stored))
        records = {r.key: r for result in results for r in result.tensors}
        rows = rows_by_name(config)
        for name, tensor in tensors.items():
            if name in rows and rows[name].fp8:
                weight, scale, error = quantise(tensor, scales, name)
                assert torch.equal(stored[name].view(torch.uint8), weight.view(torch.uint8))
                assert torch.equal(stored[f"{name}_scale_inv"], scale)
                assert records[name].fp8_error == vars(error)
                assert 0 < error.rms < 0.05
            else:
                assert torch.equal(stored[name], tensor)
                assert records[name].fp8_error is None
        assert stored.keys() == records.keys()

    def test_weight_and_scale_share_a_file(self, tmp_path, source):
        options = TargetOptions(fp8="float", max_shard_bytes=1)
        _, results = rewritten(source, tmp_path / "b", options)
        for result in results:
            keys = {record.key for record in result.tensors}
            assert len(keys) == 1 or {k.removesuffix("_scale_inv") for k in keys} <= keys


class TestRefused:
    def test_options_of_other_formats(self, source):
        options = TargetOptions(
            norms="fused", kv_up="split", down="fused", layers="stacked",
            vocab_multiple=128, iteration=7, fp8="int4", max_shard_bytes=0,
        )  # fmt: skip
        with refused("\n  norms fused:", "\n  iteration 7:", "\n  fp8 int4:", problems=8):
            HuggingFaceWriter(source.config, options)

    def test_tensors_that_are_not_the_model(self, source):
        tensors = source.hugging_face_tensors()
        tensors["x"] = tensors.pop("model.norm.weight")
        with refused("norm.weight is missing", "x of shape"):
            HuggingFaceWriter(source.config, TargetOptions()).plan(tensors, 1 << 20)

    def test_values_that_cannot_be_quantised(self, tmp_path, config, tensors):
        name = "model.layers.1.self_attn.o_proj.weight"
        tensors[name][3, 3] = torch.inf
        write_hugging_face(tmp_path / "a", config, tensors)
        source = HuggingFaceCheckpoint(tmp_path / "a")
        with refused(f"{name} holds values that are not finite"):
            rewritten(source, tmp_path / "b", TargetOptions(fp8="float"))

    def test_file_system_that_fails(self, tmp_path):
        """A full disk must not look like a damaged checkpoint."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as error:
                write_tensors({"x": torch.ones(10_000)}, tmp_path / "x.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error.value.filename == str(tmp_path / "x.safetensors")
        with pytest.raises(FileNotFoundError):
            write_tensors({"x": torch.ones(1)}, tmp_path / "missing" / "x.safetensors")
        assert os.listdir(tmp_path) == ["x.safetensors"]
