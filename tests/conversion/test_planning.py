"""What is decided before a byte is written, above all that nothing gets lost."""

import dataclasses

import pytest
import torch

from checkpoint_conversion import convert, part_runner, planning
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.planning import plan_conversion
from tests.conversion.fake_format import MemoryCheckpoint, RawWriter
from tests.conversion.support import CONFIGS, lazy, random_tensors, refused, tiny_config


@pytest.fixture
def checkpoint(tmp_path) -> MemoryCheckpoint:
    config = tiny_config(**CONFIGS["mtp"])
    return MemoryCheckpoint(tmp_path, config, random_tensors(config))


@pytest.fixture(autouse=True)
def writer_class(monkeypatch):
    """The writer of every plan; a test may change its methods."""

    class Writer(RawWriter):
        pass

    monkeypatch.setattr(planning, "writer_for", lambda to, config, options: Writer(config, options))
    return Writer


def plan(checkpoint, exclude_mtp=False, **options):
    return plan_conversion(checkpoint, "raw", TargetOptions(**options), exclude_mtp)


class TestNothingGetsLost:
    def test_everything_is_planned(self, checkpoint):
        keys = [entry.key for entry in plan(checkpoint).entries]
        assert sorted(keys) == sorted(checkpoint.stored)

    def test_a_tensor_that_the_reader_forgets(self, checkpoint):
        forgotten = "model.layers.1.mlp.experts.2.up_proj.weight"
        kept = {name: t for name, t in checkpoint.stored.items() if name != forgotten}
        checkpoint.hugging_face_tensors = lambda dtype: kept
        with refused("get lost", forgotten, problems=1):
            plan(checkpoint)

    def test_tensors_that_the_writer_forgets(self, checkpoint, writer_class):
        writer_class.plan = lambda self, tensors, nbytes: RawWriter.plan(self, tensors, nbytes)[1:]
        with refused("not get into the target", problems=3):
            plan(checkpoint)

    @pytest.mark.parametrize("what", ["part", "tensor"])
    def test_the_same_part_or_tensor_twice(self, checkpoint, writer_class, what):
        def twice(self, tensors, nbytes):
            first, *rest = RawWriter.plan(self, tensors, nbytes)
            if what == "part":
                return [first, dataclasses.replace(rest[0], name=first.name), *rest[1:]]
            doubled = first.entries + first.entries[:1]
            return [dataclasses.replace(first, entries=doubled), *rest]

        writer_class.plan = twice
        with refused("twice"):
            plan(checkpoint)


class TestMtp:
    def test_asked_without_there_being_any(self, tmp_path, config, tensors):
        planned = plan(MemoryCheckpoint(tmp_path, config, tensors), True)
        assert planned.left_out == {}
        assert "no MTP layers" in planned.notes[-1]

    def test_what_the_model_shares_with_them_stays(self, checkpoint):
        """A reader may make both of one stored tensor."""
        copy = f"model.layers.{checkpoint.config.num_layers}.embed_tokens.weight"
        tensors = dict(checkpoint.stored)
        tensors[copy] = tensors["model.embed_tokens.weight"]
        del checkpoint.stored[copy]
        checkpoint.hugging_face_tensors = lambda dtype: tensors
        assert "model.embed_tokens.weight" not in plan(checkpoint, exclude_mtp=True).left_out


class TestNumbers:
    def test_left_alone_is_listed(self, checkpoint):
        checkpoint.left_alone = {"optimizer.state": 100}
        assert plan(checkpoint).left_out == {"optimizer.state": "no weight of the model"}

    def test_parameters_count_shared_tensors_once(self, checkpoint, tmp_path):
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        last = f"model.layers.{checkpoint.config.num_layers}."
        expected = sum(
            tensor.nbytes // tensor.dtype.itemsize
            for name, tensor in checkpoint.stored.items()
            if name not in {last + copy for copy in copies}
        )
        assert plan(checkpoint).parameters == expected

    def test_bytes_by_dtype(self, checkpoint):
        planned = plan(checkpoint)
        assert set(planned.dtypes) == {"bfloat16", "float32"}
        assert planned.nbytes == sum(tensor.nbytes for tensor in checkpoint.stored.values())

    def test_parts_grow_with_the_largest_tensor(self, tmp_path, writer_class, config, tensors):
        """So that their number stays reasonable, and several fit into memory."""
        checkpoint = MemoryCheckpoint(tmp_path, config, tensors)
        asked = []

        def record(self, tensors, part_bytes):
            asked.append(part_bytes)
            return RawWriter.plan(self, tensors, part_bytes)

        writer_class.plan = record
        assert plan(checkpoint).largest == max(t.nbytes for t in checkpoint.stored.values())
        checkpoint.stored["model.norm.weight"] = large_tensor("model.norm.weight")
        assert plan(checkpoint).largest == 1 << 30
        assert asked == [64 << 20, 1 << 29]


class TestMemory:
    @pytest.fixture
    def planned(self, tmp_path, config, tensors):
        checkpoint = MemoryCheckpoint(tmp_path, config, tensors)
        checkpoint.stored["model.norm.weight"] = large_tensor("model.norm.weight")
        return plan(checkpoint)

    def test_follows_the_largest_tensor_and_what_is_resident(self, planned, monkeypatch):
        """The plan of a model with many tensors and ranks can have more than a gigabyte."""
        monkeypatch.setattr(convert, "resident", lambda: 300 * 10**6)
        assert convert.memory_for(planned) == (2 << 30) + 200 * 10**6
        monkeypatch.setattr(convert, "resident", lambda: 15 * 10**8)
        total = convert.memory_for(planned) + 15 * 10**8
        assert total <= 2.5 * planned.largest + 600 * 10**6
        # The largest part always fits.
        monkeypatch.setattr(convert, "resident", lambda: 10**12)
        assert convert.memory_for(planned) == max(part.peak for part in planned.parts) > 1 << 30


def large_tensor(name: str):
    """1 GB, of which nobody reads anything."""
    return lazy(name, torch.empty(1 << 30, dtype=torch.uint8, device="meta"))


def test_resident_memory_is_known():
    assert 50 * 10**6 < part_runner.resident() <= part_runner.peak_resident()
