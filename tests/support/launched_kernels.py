"""Which kernels the package launches, read from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import absorbed_mla

ROOT = Path(absorbed_mla.__file__).parent
_DECORATORS = ("triton.jit", "gluon.jit")
# Looked at, to know whether it is interpreted; never launched.
_NOT_LAUNCHED = {"kernels.triton.common.load_rows"}


def launched_kernels() -> set[str]:
    """Device functions that host code names, as ``module.function`` below ``absorbed_mla``."""
    texts = {_name(path): path.read_text() for path in ROOT.rglob("*.py")}
    kernels = {
        f"{module}.{node.name}"
        for module, text in texts.items()
        if ".jit" in text
        for node in ast.parse(text).body
        if _is_kernel(node)
    }
    # Other files are left unread, for time.
    mentioned = re.compile(
        rf"\b({'|'.join({kernel.rpartition('.')[2] for kernel in kernels})})\b"
    ).search
    found = set()
    for module, tree in ((m, ast.parse(text)) for m, text in texts.items() if mentioned(text)):
        known = _known(module, tree)
        for name in _used_by_host(tree):
            if known.get(name) in kernels:
                found.add(known[name])
    return found - _NOT_LAUNCHED


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(each).partition("(")[0] in _DECORATORS for each in node.decorator_list
    )


def _is_aggregate(node: ast.AST) -> bool:
    """A class of device code."""
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(each) == "aggregate" for each in node.decorator_list
    )


def _known(module: str, tree: ast.Module) -> dict[str, str]:
    """Names of a module, its own and imported ones, and what they stand for."""
    package = f"{absorbed_mla.__name__}."
    known = {node.name: f"{module}.{node.name}" for node in tree.body if _is_kernel(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            source = node.module.removeprefix(package)
            known |= {each.asname or each.name: f"{source}.{each.name}" for each in node.names}
    return known


def _used_by_host(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if not (_is_kernel(node) or _is_aggregate(node)):
            for each in ast.walk(node):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
                    yield each.id
