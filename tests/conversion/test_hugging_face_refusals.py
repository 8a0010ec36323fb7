"""Hugging Face folders that are damaged, contradictory or mean harm: everything is listed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint
from tests.conversion.support import (
    INDEX,
    SINGLE,
    change_json,
    described,
    refused,
    safetensors_bytes,
    write_model,
)

FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint of two files."""
    return write_model(tmp_path / "checkpoint")


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refuse(folder: Path, *reasons: str, follow_links: bool = False) -> CheckpointError:
    """Opening fails, with exactly these problems, or with one message."""
    with pytest.raises(CheckpointError) as error:
        HuggingFaceCheckpoint(folder, follow_links=follow_links)
    text = str(error.value)
    for reason in reasons:
        assert re.search(reason, text), f"{reason!r} is not in {text}"
    if error.value.problems:
        assert len(error.value.problems) == len(reasons)
    return error.value


class TestIndexAndFiles:
    def test_everything_they_do_not_agree_on(self, folder):
        names = weight_map(folder)
        first = load_file(folder / FIRST)
        moved, both, lost, extra = (*list(first)[:3], "model.extra.weight")
        second = load_file(folder / SECOND) | {both: first[both], extra: torch.ones(2)}
        second[moved] = first.pop(moved)
        del first[lost]
        save_file(first, folder / FIRST)
        save_file(second, folder / SECOND)
        save_file({"x": torch.ones(1)}, folder / "unnamed.safetensors")
        names["model.announced.weight"] = SECOND
        names["model.elsewhere.weight"] = "missing.safetensors"
        change_json(folder / INDEX, weight_map=names)
        refuse(
            folder,
            f"unnamed.safetensors is there, but {INDEX} does not name it",
            "missing.safetensors .* No such file",
            f"{INDEX} has {moved} in {FIRST}, which does not hold it",
            f"{moved} is in {SECOND}, but {INDEX} has it in {FIRST}",
            f"{both} is in {SECOND}, but {INDEX} has it in {FIRST}",
            f"{INDEX} has {lost} in {FIRST}, which does not hold it",
            f"{INDEX} has model.announced.weight in {SECOND}, which does not hold it",
            f"{extra} is in {SECOND}, but not in {INDEX}",
        )

    @pytest.mark.parametrize("spelling", [f"./{FIRST}", f"sub/../{FIRST}", "link.safetensors"])
    def test_one_file_under_two_names(self, folder, spelling):
        (folder / "link.safetensors").symlink_to(FIRST)
        names = weight_map(folder)
        name = next(name for name, file in names.items() if file == FIRST)
        change_json(folder / INDEX, weight_map={**names, name: spelling})
        with refused():
            HuggingFaceCheckpoint(folder)

    def test_files_without_an_index(self, folder):
        (folder / INDEX).unlink()
        refuse(folder, f"neither {SINGLE} alone nor {INDEX}.*(\n.*){{2}}", "model-00002-of-00002")

    def test_single_file_beside_others(self, folder):
        (folder / INDEX).unlink()
        (folder / FIRST).rename(folder / SINGLE)
        refuse(folder, SINGLE, SECOND)

    def test_no_config(self, folder):
        (folder / "config.json").unlink()
        refuse(folder, "has no config.json")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ({}, ["has no object weight_map"]),
            ({"weight_map": [FIRST]}, ["has no object weight_map"]),
            ({"weight_map": {"a": 1, "b": None, "c": FIRST, "d": ["x"]}}, ["a: 1", "b: ", "d: "]),
        ],
    )
    def test_weight_map(self, folder, content, why):
        (folder / INDEX).write_text(json.dumps(content))
        with refused(*why):
            HuggingFaceCheckpoint(folder)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            # All that a name can be is in test_untrusted_files.
            ("sub/../../secret.safetensors", "leads out of the folder"),
            ("{outside}/secret.safetensors", "is an absolute path"),
            ("\x1b]0;harm\x07", "cannot be printed"),
        ],
    )
    @pytest.mark.parametrize("follow_links", [False, True])
    def test_files_that_the_index_names(self, folder, name, why, follow_links):
        save_file({"stolen": torch.ones(1)}, folder.parent / "secret.safetensors")
        names = {**weight_map(folder), "stolen": name.replace("{outside}", str(folder.parent))}
        change_json(folder / INDEX, weight_map=names)
        error = refuse(folder, why, follow_links=follow_links)
        str(error).encode()
        assert "\x1b" not in str(error)

    def test_tensor_that_harms_a_terminal(self, folder):
        (folder / INDEX).unlink()
        for file in (FIRST, SECOND):
            (folder / file).unlink()
        save_file({"\x1b[2J": torch.ones(1)}, folder / SINGLE)
        error = refuse(folder, "has characters that cannot be printed")
        assert "\x1b" not in str(error)


F32 = described("F32", [2], 0, 8)
# safetensors refuses many more by itself; fuzzing tries them.
MALFORMED = {
    "empty": b"",
    "no header": safetensors_bytes(b"", b"", 0),
    "largest header": safetensors_bytes({"x": F32}, bytes(8), 2**64 - 1),
    "no JSON": safetensors_bytes(b"{x}", b""),
    "nested": safetensors_bytes(b'{"x":' * 100_000, b""),
    "truncated": safetensors_bytes({"x": F32}, bytes(7)),
    "overlapping": safetensors_bytes({"x": F32, "y": described("F32", [2], 4, 12)}, bytes(12)),
    "shape and bytes": safetensors_bytes({"x": described("F32", [3], 0, 8)}, bytes(8)),
    "unknown dtype": safetensors_bytes({"x": described("Q3", [2], 0, 8)}, bytes(8)),
    "dtype torch has not": safetensors_bytes({"x": described("F6_E2M3", [8], 0, 6)}, bytes(6)),
    "size torch has not": safetensors_bytes({"x": described("F32", [0, 2**63], 0, 0)}, b""),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_safetensors(folder, kind):
    (folder / SECOND).write_bytes(MALFORMED[kind])
    # Its tensors are not reported as missing one by one.
    with refused(SECOND, problems=1):
        HuggingFaceCheckpoint(folder)


def test_all_malformed_files_are_named(folder):
    for file in (FIRST, SECOND):
        (folder / file).write_bytes(b"")
    refuse(folder, FIRST, SECOND)


def test_wrong_tensors_in_one_error(folder):
    tensors = load_file(folder / FIRST) | load_file(folder / SECOND)
    attention = "model.layers.0.self_attn."
    tensors[f"{attention}q_x_proj.weight"] = tensors.pop(f"{attention}q_a_proj.weight")
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e5m2)
    for file in (FIRST, SECOND, INDEX):
        (folder / file).unlink()
    save_file(tensors, folder / SINGLE)
    with refused(
        "q_a_proj.weight is missing",
        "the nearest known name is model.layers.0.self_attn.q_a_proj.weight",
        "model.norm.weight has shape (3,); expected (32,)",
        "lm_head.weight is torch.float8_e5m2",
        problems=4,
    ):
        HuggingFaceCheckpoint(folder).hugging_face_tensors()
