"""Triton's private names stand in one file, and classes of device code get their constructors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import absorbed_mla

ROOT = Path(absorbed_mla.__file__).parent
OWNER = ROOT / "kernels" / "triton_private.py"


def private_names(tree: ast.Module) -> set[str]:
    """What is imported from Triton with a leading underscore, or read so from its ``standard``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            found |= {each.name for each in node.names if each.name.startswith("_")}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value).split(".")[-1]
            found |= {node.attr} if owner in ("standard", "tl", "gl", "core") else set()
    return found


def test_in_one_file():
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    found = {
        path: names
        for path, text in sources.items()
        if "triton" in text and (names := private_names(ast.parse(text)))
    }
    assert found.keys() == {OWNER}
    documented = ast.get_docstring(ast.parse(OWNER.read_text()))
    for name in found[OWNER]:
        assert name in documented or name.startswith("_elementwise_")


class TestAggregate:
    @pytest.fixture(autouse=True)
    def _gluon(self):
        pytest.importorskip("triton.experimental.gluon")

    def make(self, *fields: str):
        from triton.experimental.gluon import language as gl

        from absorbed_mla.kernels.triton_private import aggregate

        kinds = {name: gl.constexpr if name.isupper() else gl.tensor for name in fields}
        base = type("Base", (), {"__annotations__": {"batch": gl.tensor}})
        return aggregate(type("Made", (base,), {"__annotations__": kinds}))

    def source(self, made) -> str:
        """Of the constructor: what Triton keys compiled kernels by."""
        return made.hash_attrs[0].src

    def test_fields(self):
        """Its own, then inherited ones; constants are wrapped."""
        assert self.source(self.make("first", "HEADS")) == (
            "def __init__(self, first, HEADS, batch):\n"
            "    self.first = first\n"
            "    self.HEADS = gl.constexpr(HEADS)\n"
            "    self.batch = batch\n"
        )

    def test_fields_in_another_order_are_another_kernel(self):
        one, other = self.make("first", "last"), self.make("last", "first")
        assert one.hash_attrs[0].cache_key != other.hash_attrs[0].cache_key
