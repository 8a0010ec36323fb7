"""Values that are not finite, and tensors wider than their model: converted, and said."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from checkpoint_conversion import cli
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import TARGETS
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.manifest import RunningChecksum, find_manifest, read_manifest
from checkpoint_conversion.verify import verify
from tests.conversion.support import random_tensors, refused, tiny_config, write_hugging_face

NORM, WEIGHT = "model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.o_proj.weight"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint with three wrong values in two tensors."""
    config = tiny_config()
    tensors = random_tensors(config)
    tensors[NORM][3] = NAN
    tensors[WEIGHT][0, 0], tensors[WEIGHT][-1, -1] = INF, -INF
    return write_hugging_face(tmp_path_factory.mktemp("values") / "hf", config, tensors)


def not_finite(*values: torch.Tensor) -> dict[str, int]:
    """What is counted of values that are added one after the other."""
    running = RunningChecksum()
    for part in values:
        running.update(part)
    return running.not_finite()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("place", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 6])
def test_counts(dtype, place):
    """Wherever the value is, in chunks that are looked at one after the other."""
    values = torch.linspace(-100, 100, (1 << 20) + 7).to(dtype)
    assert not_finite(values) == {}
    for value, kind in ((NAN, "nan"), (INF, "infinite"), (-INF, "infinite")):
        changed = values.clone()
        changed[place] = value
        assert not_finite(changed) == {kind: 1}


def test_largest_numbers_are_finite():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        largest = torch.tensor([torch.finfo(dtype).max] * 1000, dtype=dtype)
        assert not_finite(largest, torch.zeros(0, dtype=dtype)) == {}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_fp8(dtype):
    everything = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert not_finite(everything) == {"nan": int(everything.float().isnan().sum())}


@pytest.mark.parametrize("to", TARGETS)
def test_are_reported(source, tmp_path, to):
    report = convert(source, tmp_path / "out", to)
    counts = [Counter(record.not_finite) for record in report.not_finite]
    assert sum(counts, Counter()) == {"nan": 1, "infinite": 2}
    text = "\n".join(report.lines())
    assert f"{len(report.not_finite)} tensors hold values not finite" in text
    assert "1 NaN" in text and "infinite" in text
    manifest = read_manifest(find_manifest(tmp_path / "out"))
    assert tuple(r for r in manifest.tensors if r.not_finite) == report.not_finite
    assert verify(source, tmp_path / "out", logits=False).accepted


def test_on_the_command_line(source, tmp_path, capsys):
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "hf"]
    assert cli.main([*words, "--json"]) == cli.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["not_finite"] == [
        {"key": NORM, "offset": None, "nan": 1},
        {"key": WEIGHT, "offset": None, "infinite": 2},
    ]
    assert cli.main([*words, "--force", "--strict-values"]) == cli.REFUSED
    err = capsys.readouterr().err
    assert "--strict-values" in err and f"{NORM}: 1 NaN" in err
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("resumed", ["unfinished", "finished"])
def test_strict_values_sees_what_was_converted_before(source, tmp_path, resumed):
    if resumed == "finished":
        convert(source, tmp_path / "out", "hf")
    else:
        # In several parts, of which a full disk would leave some.
        options = TargetOptions(max_shard_bytes=8000)
        with refused("--strict-values"):
            convert(source, tmp_path / "out", "hf", options, strict_values=True, workers=1)
        assert not (tmp_path / "out").exists()
    with refused("--strict-values", NORM):
        options = None if resumed == "finished" else TargetOptions(max_shard_bytes=8000)
        convert(source, tmp_path / "out", "hf", options, strict_values=True, resume=True)


def test_nothing_is_said_of_good_values(tiny_folder, tmp_path):
    report = convert(tiny_folder, tmp_path / "out", "absorbed", strict_values=True)
    assert report.not_finite == ()
    assert "WARNING" not in "\n".join(report.lines())


def test_a_tensor_in_float64_is_said(tmp_path, capsys, config, tensors):
    tensors[WEIGHT] = tensors[WEIGHT].double()
    source = write_hugging_face(tmp_path / "hf", config, tensors)
    message = f"1 tensors are float64 in a bfloat16 model (the first: {WEIGHT})"
    assert cli.main(["inspect", str(source)]) == cli.DONE
    assert message in capsys.readouterr().out
    report = convert(source, tmp_path / "out", "absorbed")
    assert any(message in note for note in report.plan.notes)
    rounded = convert(source, tmp_path / "b", "absorbed", TargetOptions(dtype=torch.bfloat16))
    assert not any("float64" in note for note in rounded.plan.notes)
