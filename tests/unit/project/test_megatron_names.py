"""Private names of Megatron's, and patches of it, are in the files with the tables of them only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest

from tests.support.megatron_names import ALL_NEEDS

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("absorbed_mla", "specs", "checkpoint_conversion")
TABLES = (
    "absorbed_mla/megatron_names.py",
    "absorbed_mla/batch_invariant/megatron_operators.py",
    "absorbed_mla/serving/megatron_engine/",
)
# Names that Megatron happens to have as well.
OF_OTHERS = {
    # Megatron-Bridge's, for classes that derive from its mapping.
    "absorbed_mla/bridge/mapping.py": {"_resolve_names"},
    # Of transformers' tokenizers.
    "absorbed_mla/serving/tokenizers/token_bytes.py": {"_decode"},
    # Ends names of compressed-tensors' tensors.
    "checkpoint_conversion/packed.py": {"_scale"},
}
ROWS = {name for need in ALL_NEEDS for name in need.names}
IN_TABLES = {name.name for name in ROWS}
# Every module has a forward; those of Megatron's classes are found by what is imported.
REPLACED = {name.name for name in ROWS if name.replaced_by} - {"forward"}
# Where Megatron gives a private name to something of its own.
_DEFINED = re.compile(
    r"\b(?:def|class) (_[a-z]\w*)|\bself\.(_[a-z]\w*)\s*(?::[^=\n]+)?=(?!=)"
    r"|^(_[a-zA-Z]\w*)\s*(?::[^=\n]+)?=(?!=)",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def private() -> set[str]:
    """All private names of Megatron's."""
    folder = Path(megatron.core.__file__).parents[1]
    texts = (path.read_text() for path in folder.rglob("*.py"))
    return {name for text in texts for found in _DEFINED.findall(text) for name in found if name}


@pytest.fixture(scope="module")
def files() -> dict[str, ast.Module]:
    paths = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    return {path: tree for path, tree in trees.items() if not path.startswith(TABLES)}


def own_names(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes of its objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            found.add(node.attr)
    return found


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of what may be a private name of another's."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (_is_own(node) and node.attr in own):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.ClassDef):
            # A class that overrides it.
            yield from ((one.lineno, one.name) for one in node.body if hasattr(one, "name"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            yield from ((node.lineno, alias.name) for alias in node.names)


def patches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of what is put in the place of something of a module's, class's or object's."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron")
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()) if not _is_own(node):
                if name in REPLACED or _root(node) in imported:
                    yield node.lineno, name
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, name, _]):
                if _root(owner) in imported:
                    yield node.lineno, ast.unparse(name)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", "")


def found_in(trees: dict[str, ast.Module], private: set[str]) -> list[str]:
    ours = {name for tree in trees.values() for name in own_names(tree)}
    of_megatron = (private - ours) | {name for name in IN_TABLES if name.startswith("_")}
    return [
        f"{path}:{line} {name}"
        for path, tree in trees.items()
        for line, name in uses(tree)
        if name in of_megatron and name not in OF_OTHERS.get(path, ())
    ]


def test_private_names(files, private):
    assert "_add_request" in private and len(private) > 1000
    assert found_in(files, private) == []


def test_patches(files):
    found = {path: [*patches(tree)] for path, tree in files.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_check_itself():
    text = """
from megatron.core.x import _a, module
class C(Base):
    def __init__(self):
        self._own = 1
    def _deregister_blocks(self): ...
    def f(self, engine):
        engine._add_request(self._own, self._given)
        getattr(engine, "_sampling")
        engine.update_requests = None
        module.anything = 3
"""
    tree = ast.parse(text)
    private = {"_a", "_given", "_own"}
    names = [one.split()[-1] for one in found_in({"x.py": tree}, private)]
    assert sorted(names) == ["_a", "_add_request", "_deregister_blocks", "_given", "_sampling"]
    assert [name for _, name in patches(tree)] == ["update_requests", "anything"]
