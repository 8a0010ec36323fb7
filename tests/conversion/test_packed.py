"""Weights of four bits: against their definition and compressed-tensors, and in whole folders."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_conversion.cli import DONE, main
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.inspection import inspect_checkpoint
from checkpoint_conversion.packed import (
    INT4,
    MXFP4,
    PACKINGS,
    PackedWeight,
    Packing,
    dequantise,
    quantise,
)
from tests.conversion.support import (
    PeakMemory,
    assert_same_tensors,
    change_json,
    hugging_face_config,
    lazy,
    load_all,
    random_tensors,
    read,
    refused,
    tiny_config,
    write_hugging_face,
)
from tests.conversion.test_fp8 import recording

by_packing = pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
IGNORED = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|down)_proj.*",
]


def random_weight(packing: Packing, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    codes = torch.randint(256, (rows, columns // 2)).to(torch.uint8)
    groups = (rows, columns // 32)
    if packing is MXFP4:
        return codes, torch.randint(100, 140, groups).to(torch.uint8)
    return codes.view(torch.int32), (0.01 + torch.rand(groups)).bfloat16()


def by_definition(packing: Packing, codes: Tensor, scale: Tensor) -> Tensor:
    """One value at a time; a code is sign, exponent and mantissa, or a number from -8."""
    values = []
    for i, row in enumerate(codes.view(torch.uint8).tolist()):
        nibbles = [nibble for byte in row for nibble in (byte % 16, byte // 16)]
        for j, code in enumerate(nibbles):
            if packing is INT4:
                values.append((code - 8) * scale[i, j // 32].item())
                continue
            sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
            # The bias is 1; exponent 0 has no leading one.
            value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            power = scale.view(torch.uint8)[i, j // 32].item() - 127
            values.append((-1) ** sign * value * 2.0**power)
    return torch.tensor(values, dtype=torch.float64).view(len(codes), -1)


def weight_of(packing: Packing, rows: int = 6, columns: int = 96, reads: list | None = None):
    """A stored weight in memory, and its codes and scales."""
    stored = random_weight(packing, rows, columns)
    one = recording if reads is not None else lambda name, tensor, reads: lazy(name, tensor)
    tensors = [one(f"w{suffix}", t, reads) for suffix, t in zip(("_packed", "_scale"), stored)]
    return PackedWeight(name="w", packed=tensors[0], scale=tensors[1]), stored


class TestValues:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @by_packing
    def test_against_the_definition(self, packing, dtype):
        stored = random_weight(packing, 40, 352)
        expected = by_definition(packing, *stored).to(dtype)
        assert torch.equal(dequantise(packing, *stored, dtype, "w"), expected)

    def test_every_code_and_scale_of_mxfp4(self):
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(-1, 16)
        assert torch.equal(
            dequantise(MXFP4, codes, torch.full((256, 1), 127).to(torch.uint8), torch.float32, "w"),
            by_definition(MXFP4, codes, torch.full((256, 1), 127).to(torch.uint8)).float(),
        )
        # Half of 2^-126 is below the normal numbers; 6 times 2^125 is the largest value.
        codes, scale = torch.full((252, 16), 0x51, dtype=torch.uint8), torch.arange(252).view(-1, 1)
        found = dequantise(MXFP4, codes, scale.to(torch.uint8), torch.bfloat16, "w")
        assert torch.equal(found.double(), by_definition(MXFP4, codes, scale.to(torch.uint8)))

    @by_packing
    def test_against_compressed_tensors(self, packing):
        """Its values of our codes; our codes of fresh values."""
        args, compressor = theirs(packing)
        codes, scale = random_weight(packing, 40, 352)
        shape = torch.tensor([40, 352])
        state = {"weight_packed": codes, "weight_scale": scale, "weight_shape": shape}
        expected = compressor.decompress(state, args)["weight"]
        assert torch.equal(dequantise(packing, codes, scale, expected.dtype, "w"), expected)
        weight = torch.randn(40, 352, dtype=torch.bfloat16)
        fresh = quantise(packing, weight, *random_weight(packing, 40, 352), "w")
        from compressed_tensors.quantization.utils import calculate_qparams

        groups = weight.view(40, -1, 32)
        made, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args.weights)
        state = compressor.compress({"weight": weight.float(), "weight_scale": made}, args)
        scale = state["weight_scale"] if packing is MXFP4 else made
        assert torch.equal(fresh[1], scale.to(fresh[1].dtype))
        assert torch.equal(fresh[0], state["weight_packed"])

    @by_packing
    def test_not_finite(self, packing):
        codes, scale = random_weight(packing, 4, 64)
        scale[3, 1] = 255 if packing is MXFP4 else math.inf
        with refused("w_scale holds scales that are not finite"):
            dequantise(packing, codes, scale, torch.bfloat16, "w")
        scale[3, 1] = 254 if packing is MXFP4 else 1e38
        codes.view(torch.uint8)[:] = 0x77 if packing is MXFP4 else 0
        with refused("w has values up to inf, which torch.bfloat16 cannot hold"):
            dequantise(packing, codes, scale, torch.bfloat16, "w")

    @by_packing
    def test_little_memory_beside_the_result(self, packing):
        """The whole weight in float32 would be another 134 MB."""
        codes = torch.zeros(8192, 2048, dtype=torch.uint8).view(packing.dtype)
        scale = torch.ones(8192, 128, dtype=packing.scales[0])
        memory = PeakMemory()
        result = dequantise(packing, codes, scale, torch.bfloat16, "w")
        assert memory.growth < result.nbytes + (32 << 20)


def theirs(packing: Packing):
    """compressed-tensors' scheme and compressor."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(quantisation(packing)["config_groups"]["group_0"])
    return scheme, BaseCompressor.get_value_from_registry(packing.format)


class TestParts:
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize(("start", "length"), [(0, 32), (5, 1), (31, 2), (40, 50), (64, 32)])
    @by_packing
    def test_need_only_their_groups(self, packing, dim, start, length):
        reads: list[int] = []
        weight, stored = weight_of(packing, 96, 96, reads)
        part = weight.values(torch.float32).narrow(dim, start, length)
        expected = by_definition(packing, *stored).narrow(dim, start, length).float()
        assert torch.equal(load_all({"x": part})["x"], expected)
        groups = length if dim == 0 else (start + length + 31) // 32 - start // 32
        assert sum(reads) <= groups * (96 * (32 if dim else 96)) // (2 * packing.dtype.itemsize) + (
            groups * (96 if dim else 3)
        )
        again = part.narrow(1 - dim, 30, 40).narrow(1 - dim, 1, 39)
        assert torch.equal(load_all({"x": again})["x"], expected.narrow(1 - dim, 31, 39))


class TestQuantise:
    @by_packing
    def test_equal_groups_keep_their_bits(self, packing):
        """Also where other scales give the same values, as of the even ones."""
        codes, scale = random_weight(packing, 8, 128)
        if packing is INT4:
            codes.view(torch.uint8)[:4] &= 0xEE
        values = dequantise(packing, codes, scale, torch.bfloat16, "w")
        same = quantise(packing, values, codes, scale, "w")
        assert torch.equal(same[0], codes) and torch.equal(same[1], scale)
        assert (same[2].max, same[2].rms) == (0, 0)
        values[5, 70] = 1.5 * values.float().abs().max()
        changed = quantise(packing, values, codes, scale, "w")
        moved = (changed[0] != codes).view(8, 4, -1).any(-1) | (changed[1] != scale)
        assert moved.nonzero().tolist() == [[5, 2]]
        after = dequantise(packing, *changed[:2], torch.float32, "w")
        assert (after[5, 70] / values[5, 70] - 1).abs() < 0.15
        assert 0 < changed[2].max < 0.2

    @by_packing
    def test_fresh_values_are_the_nearest(self, packing):
        """Of all 16 codes, for zeros of both signs and the middles between neighbours, too."""
        values = torch.randn(64, 64)
        values[0] = torch.arange(64) / 8 - 4
        values[1], values[2] = 0.0, -0.0
        codes, scale, error = quantise(packing, values, *random_weight(packing, 64, 64), "w")
        after = dequantise(packing, codes, scale, torch.float32, "w")
        own = scale.view(torch.float8_e8m0fnu) if packing is MXFP4 else scale
        steps = own.float().repeat_interleave(32, 1)[..., None] * torch.tensor(packing.values)
        best = (steps - values[..., None]).abs().amin(-1)
        assert torch.allclose((after - values).abs(), best, rtol=1e-5, atol=1e-7)
        assert (after[1:3] == 0).all() and 0 < error.rms < 0.15

    def test_halves_go_to_the_even_code_of_mxfp4(self):
        values = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4])
        codes, scale, _ = quantise(MXFP4, values, *random_weight(MXFP4, 1, 32), "w")
        assert codes.tolist() == [[0x20, 0x42, 0x64, 0x76] * 4] and scale.tolist() == [[127]]

    def test_not_finite(self):
        values = torch.zeros(4, 64)
        values[3, 3] = math.nan
        with refused("w holds values that are not finite"):
            quantise(INT4, values, *random_weight(INT4, 4, 64), "w")


def quantisation(packing: Packing, **weights) -> dict:
    """The section of config.json as Kimi-K2-Thinking and Kimi-K3 have it."""
    fields = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": packing.kind,
        **weights,
    }
    if packing is MXFP4:
        fields["scale_dtype"] = "torch.uint8"
    group = {"targets": ["Linear"], "weights": fields}
    return {
        "config_groups": {
            "group_0": {**group, "input_activations": None, "output_activations": None}
        },
        "format": packing.format,
        "ignore": IGNORED,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def packed_folder(
    folder: Path, packing: Packing, prefix: str = "", **changes
) -> tuple[Path, dict, dict]:
    """A tiny model whose routed experts have four bits; what is stored, and what it means."""
    changes |= {"moe_intermediate_size": 32, "quantization_config": quantisation(packing)}
    config = tiny_config(**changes)
    stored, plain = {}, {}
    for name, tensor in random_tensors(config).items():
        plain[name] = stored[prefix + name] = tensor
        if ".mlp.experts." in name:
            codes, scale = random_weight(packing, *tensor.shape)
            plain[name] = by_definition(packing, codes, scale).bfloat16()
            del stored[prefix + name]
            stored |= {f"{prefix}{name}_packed": codes, f"{prefix}{name}_scale": scale}
            if packing is INT4:
                stored[f"{prefix}{name}_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    write_hugging_face(folder, config, stored)
    if prefix:
        # As Kimi-K2.5: config.json of a model of images has the section in that of the text model.
        whole = {"model_type": "kimi_k25", "text_config": config.hugging_face}
        (folder / "config.json").write_text(json.dumps(whole))
    return folder, stored, plain


def files(folder: Path) -> dict[str, Tensor]:
    return load_all(dict(open_checkpoint(folder).stored))


@by_packing
class TestFolders:
    def test_read_converted_and_written_back(self, packing, tmp_path, capsys):
        """Every bit of every file."""
        folder, stored, plain = packed_folder(tmp_path / "hf", packing)
        inspection = inspect_checkpoint(folder)
        assert inspection.layout["quantisation"] == f"{packing.name} in groups of 32"
        assert not inspection.problems and not any("files hold" in n for n in inspection.notes)
        assert_same_tensors(read(folder), plain)
        absorbed, back = str(tmp_path / "absorbed"), str(tmp_path / "back")
        convert(folder, tmp_path / "absorbed", "absorbed")
        assert_same_tensors(read(tmp_path / "absorbed"), plain)
        command = ["convert", absorbed, back, "--to", "hf", "--quantised-like", str(folder)]
        assert main(command) == DONE
        assert_same_tensors(files(tmp_path / "back"), stored)
        sections = [
            json.loads((Path(one) / "config.json").read_text())["quantization_config"]
            for one in (folder, back)
        ]
        assert sections[0] == sections[1]
        assert main(["verify", str(folder), absorbed, "--no-logits"]) == DONE
        assert main(["verify", str(folder), back, "--no-logits"]) == DONE
        capsys.readouterr()

    def test_a_weight_that_was_trained(self, packing, tmp_path):
        """Its own codes change, and no others; the report has the error."""
        folder, stored, plain = packed_folder(tmp_path / "hf", packing)
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        trained = {**plain, name: torch.randn(plain[name].shape).bfloat16()}
        config = tiny_config(moe_intermediate_size=32)
        plain_folder = write_hugging_face(tmp_path / "trained", config, trained)
        report = convert(plain_folder, tmp_path / "out", "hf", TargetOptions(quantised_like=folder))
        found = files(tmp_path / "out")
        assert found.keys() == stored.keys()
        changed = {key for key in stored if not torch.equal(found[key], stored[key])}
        assert changed == {f"{name}_packed", f"{name}_scale"}
        error = read(tmp_path / "out")[name].float() - trained[name].float()
        assert report.fp8_errors["max_in"] == f"{name}_packed"
        assert 0.05 < error.norm() / trained[name].float().norm() < 0.15

    def test_to_fp8(self, packing, tmp_path):
        folder, _, plain = packed_folder(tmp_path / "hf", packing)
        convert(folder, tmp_path / "fp8", "hf", TargetOptions(fp8="ue8m0"))
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        assert files(tmp_path / "fp8")[name].dtype == torch.float8_e4m3fn
        error = read(tmp_path / "fp8")[name].float() - plain[name].float()
        assert error.norm() < 0.04 * plain[name].float().norm()

    def test_refused_tensors(self, packing, tmp_path):
        config = tiny_config(moe_intermediate_size=32)
        folder, stored, _ = packed_folder(tmp_path / "hf", packing)
        first, second = (f"model.layers.{i}.mlp.experts.0.down_proj.weight" for i in (1, 2))
        stored[f"{first}_scale"] = stored[f"{first}_scale"][:1]
        del stored[f"{second}_scale"]
        third = "model.layers.2.mlp.experts.1.down_proj.weight"
        stored[third] = torch.zeros(32, 32)
        stored[f"{second}_zero_point"] = torch.zeros(4, 1, dtype=torch.int32)
        with refused(
            f"{first}_scale has shape (1, 1); expected (32, 1), one scale for 32 values",
            f"{second}_scale is missing; expected shape (32, 1)",
            f"{second}_zero_point of shape (4, 1) is unknown",
            f"{third} is stored as it is and in four bits",
        ):
            read(write_hugging_face(tmp_path / "wrong", config, stored))
        with refused("--quantised-like", "is another model", "(32, 32) there, and (16, 32) here"):
            options = TargetOptions(quantised_like=folder)
            convert(
                write_hugging_face(tmp_path / "16", tiny_config(), random_tensors(tiny_config())),
                tmp_path / "out",
                "hf",
                options,
            )


def test_inside_of_a_model_of_images(tmp_path):
    folder, stored, plain = packed_folder(tmp_path / "hf", INT4, "language_model.")
    convert(folder, tmp_path / "absorbed", "absorbed")
    assert_same_tensors(read(tmp_path / "absorbed"), plain)
    convert(tmp_path / "absorbed", tmp_path / "back", "hf", TargetOptions(quantised_like=folder))
    alone = {name.removeprefix("language_model."): tensor for name, tensor in stored.items()}
    assert_same_tensors(files(tmp_path / "back"), alone)


def test_folder_that_does_not_say_what_its_codes_are(tmp_path):
    folder, _, _ = packed_folder(tmp_path / "hf", INT4)
    change_json(folder / "config.json", quantization_config=None)
    [note] = [note for note in inspect_checkpoint(folder).notes if "files hold" in note]
    assert note == "the files hold INT4 weights, and config.json says otherwise"
    with refused("must hold four-bit weights", "config.json has no quantization_config"):
        convert(folder, tmp_path / "out", "hf", TargetOptions(quantised_like=folder))


def test_sizes_that_are_not_those_of_the_codes(tmp_path):
    _, stored, _ = packed_folder(tmp_path / "hf", INT4)
    name = "model.layers.1.mlp.experts.0.down_proj.weight_shape"
    stored[name] = torch.tensor([32, 31], dtype=torch.int32)
    config = tiny_config(moe_intermediate_size=32)
    with refused(f"{name} says [32, 31]; expected [32, 32]"):
        read(write_hugging_face(tmp_path / "wrong", config, stored))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantised_like": "plain"}, "must hold four-bit weights"),
        ({"quantised_like": "plain", "fp8": "float"}, "fp8 float: not with quantised_like"),
    ],
    ids=str,
)
def test_refused_options(tiny_folder, tmp_path, options, message):
    options = TargetOptions(**{**options, "quantised_like": tiny_folder})
    with refused(message):
        convert(tiny_folder, tmp_path / "out", "hf", options)
    with refused("--quantised-like", "Megatron's weights are not quantised"):
        convert(tiny_folder, tmp_path / "out", "absorbed", options)


GROUP = "quantization_config.config_groups.group_0."
REFUSED = {
    "asymmetric": ({"symmetric": False}, "weights.symmetric must be True, got False"),
    "activation order": ({"actorder": "group"}, "weights.actorder must be null, got 'group'"),
    "other groups": ({"group_size": 128}, "weights.group_size must be 32, got 128"),
    "no groups": ({"group_size": None}, "weights.group_size is missing; it must be 32"),
    "channels": ({"strategy": "channel", "group_size": None}, "weights.strategy must be 'group'"),
    "eight bits": ({"num_bits": 8}, "weights.num_bits must be 4, got 8"),
    "no bits": ({"num_bits": None}, "weights.num_bits is missing; it must be 4"),
    "floats": ({"type": "float"}, "weights.type must be 'int', got 'float'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_schemes(case):
    weights, message = REFUSED[case]
    with refused(f"{GROUP}{message}"):
        tiny_config(quantization_config=quantisation(INT4, **weights))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format must be 'pack-quantized' or 'mxfp4-pack-"),
        ({"quant_method": "awq"}, "quant_method must be 'fp8' or 'compressed-tensors', got 'awq'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme must be left out"),
        ({"quantization_status": "frozen"}, "quantization_status must be 'compressed'"),
        ({"transform_config": {"config_groups": {"a": 1}}}, "config_groups must be left out"),
        ({"config_groups": {"a": {"input_activations": {"num_bits": 8}}}}, "input_activations"),
        ({"config_groups": {}}, "config_groups must be an object with a group, got {}"),
        ({"config_groups": {"a": {}}}, "config_groups.a.weights is missing"),
        ({"config_groups": {"a": 5}}, "config_groups.a must be an object, got 5"),
    ],
    ids=str,
)
def test_refused_sections(fields, message):
    config = hugging_face_config(quantization_config={**quantisation(INT4), **fields})
    with refused(message):
        tiny_config(**config)
