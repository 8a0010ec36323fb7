"""What ``verify`` calls equal, different and damaged."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_conversion.comparison import checksum, compare_tensors
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import TARGETS
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.manifest import find_manifest
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.verify import verify
from tests.conversion.support import (
    V2_LITE,
    lazy,
    random_tensors,
    refused,
    tensor_checksum,
    tiny_config,
    write_hugging_face,
    write_model,
)

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)
NAME = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module", params=TARGETS)
def converted(request, tiny_folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / request.param
    convert(tiny_folder, target, request.param)
    return target


@pytest.fixture
def write(tmp_path):
    """Writes a Hugging Face folder in which some tensors, or fields of the config, are others."""
    folders = (tmp_path / f"other-{number}" for number in range(9))

    def write(tensors: dict[str, Tensor] | None = None, config: ModelConfig = CONFIG) -> Path:
        return write_hugging_face(next(folders), config, {**TENSORS, **(tensors or {})})

    return write


def with_element(value: float, name: str = NAME) -> dict[str, Tensor]:
    changed = TENSORS[name].clone()
    changed.view(-1)[5] = value
    return {name: changed}


def compare(a: Path, b: Path, **options):
    return verify(a, b, logits=False, **options)


class TestEqual:
    def test_formats(self, tiny_folder, converted):
        report = compare(tiny_folder, converted)
        assert report.equal and report.accepted
        assert report.tensors == len(TENSORS)
        assert not (report.differences or report.only_in_a or report.shapes or report.configs)
        first, second = report.sides
        assert first.checksum == second.checksum is not None
        assert first.manifest is None and second.manifest.matches
        assert "the same model, bit for bit" in "\n".join(report.lines())

    def test_everything_is_read(self, tiny_folder, converted):
        """Of both, and of the one with a manifest once more."""
        weights = sum(tensor.nbytes for tensor in TENSORS.values())
        assert compare(tiny_folder, converted).nbytes >= 3 * weights

    def test_checksum_of_the_model_depends_on_every_tensor(self, tiny_folder, write):
        report = compare(tiny_folder, write(with_element(3.0)))
        assert report.sides[0].checksum != report.sides[1].checksum

    def test_as_json(self, tiny_folder, write):
        report = compare(tiny_folder, write(with_element(math.nan)))
        document = json.loads(json.dumps(report.as_json(), allow_nan=False))
        assert document["equal"] is document["accepted"] is False
        assert document["differences"][0]["name"] == NAME


class TestDifferent:
    def test_one_value(self, tiny_folder, write):
        report = compare(tiny_folder, write(with_element(100.0)))
        old, largest = float(TENSORS[NAME].view(-1)[5]), float(TENSORS[NAME].abs().max())
        (difference,) = report.differences
        assert difference.name == NAME and difference.rounded is None
        assert difference.max_abs == pytest.approx(100 - old)
        assert difference.max_rel == pytest.approx((100 - old) / largest)
        assert not report.equal and not report.accepted
        assert any(NAME in line for line in report.lines())

    def test_tolerance(self, tiny_folder, write):
        old, largest = float(TENSORS[NAME].view(-1)[5]), float(TENSORS[NAME].abs().max())
        other = write(with_element(old * 1.05))
        error = compare(tiny_folder, other).differences[0].max_rel
        assert 0 < error < 0.06 * abs(old) / largest
        assert compare(tiny_folder, other, tolerance=1.01 * error).accepted
        assert not compare(tiny_folder, other, tolerance=1.01 * error).equal
        assert not compare(tiny_folder, other, tolerance=0.99 * error).accepted

    def test_signs_of_zero_are_bits(self, tiny_folder, write):
        zero, minus = write(with_element(0.0)), write(with_element(-0.0))
        (difference,) = compare(zero, minus).differences
        assert difference.max_abs == 0
        assert not compare(zero, minus).accepted

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_not_finite(self, tiny_folder, write, value):
        report = compare(tiny_folder, write(with_element(value)), tolerance=1e9)
        (difference,) = report.differences
        assert difference.not_finite == 1 and difference.max_abs == 0
        assert not report.accepted

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_the_same_where_it_is_not_finite(self, write, value):
        a = write(with_element(value))
        assert compare(a, write(with_element(value))).equal
        other = with_element(value)
        other[NAME].view(-1)[6] = 50
        (difference,) = compare(a, write(other)).differences
        assert difference.not_finite == 0 and difference.max_abs > 40

    def test_worst_first(self, tiny_folder, write):
        other = "model.layers.0.mlp.up_proj.weight"
        third = "lm_head.weight"
        changes = {**with_element(50.0), **with_element(90.0, other), **with_element(70.0, third)}
        report = compare(tiny_folder, write(changes))
        assert [d.name for d in report.differences] == [other, third, NAME]

    def test_shapes_and_configs(self, tiny_folder, tmp_path):
        report = compare(tiny_folder, write_model(tmp_path / "wider", intermediate_size=64))
        name = "model.layers.0.mlp.up_proj.weight"
        assert report.shapes[name] == ((48, 32), (64, 32))
        assert report.configs == {"ffn_hidden_size": (48, 64)}
        # Not all of them could be compared.
        assert report.sides[0].checksum is report.sides[1].checksum is None
        assert not report.equal

    def test_config_alone(self, tiny_folder, write):
        """The same weights turned by other angles are another model."""
        scaling = {**CONFIG.hugging_face["rope_scaling"], "mscale_all_dim": 0.5}
        report = compare(tiny_folder, write(config=tiny_config(rope_scaling=scaling)))
        assert report.configs == {"mscale_all_dim": (1.0, 0.5)}
        assert not report.differences
        assert not report.equal and not report.accepted

    def test_names_for_the_same(self, tiny_folder, write):
        """Of one field in another style, and of one model under another name."""
        fields = dict(CONFIG.hugging_face, model_type="kimi_k2", rms_norm_eps=1e-06)
        fields["rope_parameters"] = {**fields.pop("rope_scaling"), "rope_theta": 10000.0}
        assert compare(tiny_folder, write(config=ModelConfig.from_hugging_face(fields))).equal

    def test_another_architecture(self, tiny_folder, tmp_path):
        report = compare(tiny_folder, write_model(tmp_path / "lite", **V2_LITE))
        assert "model.layers.0.self_attn.q_proj.weight" in report.only_in_b
        assert "model.layers.0.self_attn.q_b_proj.weight" in report.only_in_a
        assert report.configs["q_lora_rank"] == (16, None)


class TestDtypes:
    @pytest.fixture
    def wide(self, tmp_path) -> Path:
        return write_model(tmp_path / "wide", torch.float32, torch_dtype="float32")

    def test_rounded(self, wide, tmp_path):
        convert(wide, tmp_path / "narrow", "absorbed", TargetOptions(dtype=torch.bfloat16))
        report = compare(wide, tmp_path / "narrow")
        assert report.differences and not report.equal
        assert all(d.rounded for d in report.differences)
        assert all(d.dtypes == ("float32", "bfloat16") for d in report.differences)
        # Half a unit in the last of 8 places.
        assert all(0 < d.max_rel <= 2**-8 for d in report.differences)
        assert compare(wide, tmp_path / "narrow", tolerance=2**-8).accepted
        assert all(d.rounded for d in compare(tmp_path / "narrow", wide).differences)

    def test_not_rounded(self):
        wide, narrow = (torch.ones(4, dtype=d) for d in (torch.float32, torch.bfloat16))
        assert compare_tensors("x", lazy("x", wide), lazy("x", narrow)).difference.rounded
        # The next number that bfloat16 has.
        narrow[3] = 1.0078125
        assert not compare_tensors("x", lazy("x", wide), lazy("x", narrow)).difference.rounded


def test_mtp_layers_are_missing_or_left_out_on_request(tmp_path):
    source = write_model(tmp_path / "hf", num_nextn_predict_layers=1)
    convert(source, tmp_path / "without", "absorbed", exclude_mtp=True)
    missing = compare(source, tmp_path / "without")
    assert len(missing.only_in_a) > 5
    assert all(name.startswith("model.layers.3.") for name in missing.only_in_a)
    assert missing.configs == {"mtp_layers": (1, 0)}
    assert not missing.equal
    report = compare(source, tmp_path / "without", exclude_mtp=True)
    assert report.equal
    assert report.left_out == dict.fromkeys(missing.only_in_a, "--exclude-mtp")


def flip_bit(folder: Path, values: Tensor) -> Path:
    """Change one bit of the file that holds these values; the file."""
    content = values.contiguous().view(torch.uint8).numpy().tobytes()
    for file in sorted(folder.rglob("*")):
        data = bytearray(file.read_bytes()) if file.is_file() else bytearray()
        at = data.find(content)
        if at >= 0:
            data[at + 1] ^= 4
            file.write_bytes(data)
            return file
    raise AssertionError("these values are in no file")


class TestManifest:
    def test_as_written(self, converted):
        report = verify(converted)
        assert report.equal and report.accepted
        assert report.sides[0].manifest.records >= len(TENSORS) / 2
        assert report.tensors == 0 and report.nbytes > 0

    @pytest.mark.parametrize("to", TARGETS)
    def test_one_bit(self, tiny_folder, tmp_path, to):
        convert(tiny_folder, tmp_path / "target", to)
        flip_bit(tmp_path / "target", TENSORS["model.embed_tokens.weight"])
        report = verify(tmp_path / "target")
        (problem,) = report.sides[0].manifest.problems
        assert "embed" in problem and "checksum" in problem
        assert not report.equal and not report.accepted
        # It is also another model.
        both = compare(tiny_folder, tmp_path / "target", tolerance=1e9)
        assert [d.name for d in both.differences] == ["model.embed_tokens.weight"]
        assert not both.accepted

    def test_without(self, tiny_folder):
        with refused(str(tiny_folder), "no conversion_manifest.json", "second checkpoint"):
            verify(tiny_folder)

    def edited(self, tiny_folder, folder, edit) -> tuple[str, ...]:
        convert(tiny_folder, folder, "hf")
        path = find_manifest(folder)
        document = json.loads(path.read_text())
        edit(document["tensors"])
        path.write_text(json.dumps(document))
        return verify(folder).sides[0].manifest.problems

    def test_records_and_tensors_missing(self, tiny_folder, tmp_path):
        def edit(records):
            records[:] = [r for r in records if r["key"] != NAME]
            records.append({**records[0], "key": "model.more.weight"})

        assert set(self.edited(tiny_folder, tmp_path / "x", edit)) == {
            f"{NAME} is stored, but not in the manifest",
            "model.more.weight is in the manifest, but not stored",
        }

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            ({"dtype": "float16"}, ("is bfloat16", "manifest has float16")),
            ({"shape": [3, 3]}, ("has shape", "manifest has (3, 3)")),
            ({"offset": [0, 0], "shape": [2, 24]}, ("do not make up",)),
            ({"offset": [900, 0]}, ("at [900, 0]",)),
            ({"offset": [0]}, ("at [0]",)),
            ({"checksum": "0" * 32}, ("checksum", "0" * 32)),
        ],
    )
    def test_record_that_does_not_fit(self, tiny_folder, tmp_path, change, parts):
        def edit(records):
            next(r for r in records if r["key"] == NAME).update(change)

        problems = " ".join(self.edited(tiny_folder, tmp_path / "x", edit))
        assert NAME in problems
        for part in parts:
            assert part in problems


class TestRefused:
    def test_no_checkpoint(self, tiny_folder, tmp_path):
        for a, b in ((tiny_folder, tmp_path), (tmp_path, tiny_folder), (tmp_path, None)):
            with refused(str(tmp_path)):
                verify(a, b, logits=False)

    def test_hf_config_without_megatron(self, tiny_folder):
        with refused("--hf-config", "Megatron"):
            compare(tiny_folder, tiny_folder, hf_config=tiny_folder / "config.json")

    def test_hf_config_is_for_the_megatron_checkpoint(self, tiny_folder, tmp_path):
        folder, config = tmp_path / "absorbed", tiny_folder / "config.json"
        convert(tiny_folder, folder, "absorbed")
        assert compare(tiny_folder, folder, hf_config=config).equal

    @pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
    @pytest.mark.parametrize("option", ["tolerance", "logits_tolerance"])
    def test_tolerance(self, tiny_folder, option, value):
        with refused("--" + option.replace("_", "-"), str(value)):
            compare(tiny_folder, tiny_folder, **{option: value})

    @pytest.mark.parametrize(
        "options", [{"exclude_mtp": True}, {"logits": True}, {"text": Path("x")}]
    )
    def test_options_that_need_two(self, tiny_folder, options):
        with refused("two checkpoints", next(iter(options)).replace("_", "-")):
            verify(tiny_folder, **options)


class TestSlabs:
    """Tensors larger than the memory are compared in parts, if files can be read in parts."""

    SHAPE = (3000, 4096)

    def rows(self, start: int, length: int) -> Tensor:
        """The largest value is in the middle."""
        return 1500 - (torch.arange(start, start + length) - 1500.0).abs()

    def huge(self, wrong_row: int | None = None) -> tuple[LazyTensor, list[int]]:
        """A tensor whose rows are made when asked for, and how many rows that were each time."""
        asked: list[int] = []

        def rows(dim: int, start: int, length: int) -> LazyTensor:
            assert dim == 0

            def load(session) -> Tensor:
                asked.append(length)
                values = self.rows(start, length)
                if wrong_row is not None and start <= wrong_row < start + length:
                    values[wrong_row - start] += 7
                return values[:, None].expand(length, self.SHAPE[1])

            return self.made((length, self.SHAPE[1]), load)

        def refuse(session) -> Tensor:
            raise AssertionError("the whole tensor was loaded")

        return self.made(self.SHAPE, refuse, rows), asked

    @staticmethod
    def made(shape: tuple[int, int], load, part=None) -> LazyTensor:
        return LazyTensor(shape, torch.float32, load, frozenset(), 4 * math.prod(shape), part)

    def test_parts(self):
        a, asked = self.huge()
        assert compare_tensors("x", a, self.huge()[0]).difference is None
        assert len(asked) > 1 and sum(asked) == self.SHAPE[0]

    @pytest.mark.parametrize("row", [0, 1023, 1024, 2999])
    def test_difference_in_any_part(self, row):
        difference = compare_tensors("x", self.huge()[0], self.huge(row)[0]).difference
        assert difference.max_abs == 7
        assert difference.max_rel == 7 / 1500

    def test_checksum_is_that_of_the_whole(self):
        values = self.rows(0, self.SHAPE[0])[:, None].expand(self.SHAPE)
        assert checksum(self.huge()[0]) == tensor_checksum(values)

    def test_file_that_cannot_be_read_in_parts(self):
        """Read once for all slabs, and compared with one that can."""
        values = self.rows(0, self.SHAPE[0])[:, None].expand(self.SHAPE)
        loads = []
        whole = self.made(self.SHAPE, lambda session: loads.append(1) or values)
        assert compare_tensors("x", whole, self.huge(5)[0]).difference.max_abs == 7
        assert len(loads) == 2


def test_an_option_that_there_is_not(tmp_path):
    """Also where both checkpoints are Hugging Face's, which have no options of Megatron's."""
    folder = write_model(tmp_path / "hf", **V2_LITE)
    with pytest.raises(TypeError, match="follow_link"):
        verify(folder, folder, follow_link=True)
