"""Which lines of the package run: each statement is preceded by one that says so.

Coverage's tracer is called for every line and call of the process, of Megatron's and PyTorch's too,
and takes half as long again as the tests; statements that are compiled into the package take next
to nothing. What was found is written as coverage's own data, for ``coverage combine`` and
``coverage report``::

    ABSORBED_MLA_LINES=1 COVERAGE_FILE=.coverage python -m pytest tests/unit
"""

import ast
import functools
import hashlib
import importlib.machinery
import os
import sys
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

VARIABLE = "ABSORBED_MLA_LINES"
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("absorbed_mla", "specs", "checkpoint_conversion")
# In every module that is measured: its lines that have run, as keys.
_NAME = "__lines__"
_FOUND: dict[str, dict[int, int]] = {}


class Probes(ast.NodeTransformer):
    """Puts ``__lines__[line] = 1`` before each statement."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                setattr(node, field, _probed(node, block, field == "body"))
        return node


def _probed(node: ast.AST, block: list[ast.stmt], is_body: bool) -> list[ast.stmt]:
    first = _first_to_probe(node, block) if is_body else 0
    probed = block[:first]
    lines = [statement.lineno for statement in probed]
    # They are lines of their own, and have been reached where their bodies are.
    if is_body and isinstance(node, ast.ExceptHandler):
        lines.append(node.lineno)
    if is_body and isinstance(node, ast.match_case):
        lines.append(node.pattern.lineno)
    for statement in block[first:]:
        lines.append(statement.lineno)
        lines += [decorator.lineno for decorator in getattr(statement, "decorator_list", ())]
        probed += [_probe(lines, statement), statement]
        lines = []
    return probed


def _first_to_probe(node: ast.AST, block: list[ast.stmt]) -> int:
    """The number of statements that must stay at the beginning."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = int(isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None)
    while first < len(block) and _is_future(block[first]):
        first += 1
    return first


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _probe(lines: list[int], statement: ast.stmt) -> ast.stmt:
    targets: list[ast.expr] = [
        ast.Subscript(ast.Name(_NAME, ast.Load()), ast.Constant(line), ast.Store())
        for line in lines
    ]
    probe = ast.copy_location(ast.Assign(targets, ast.Constant(1)), statement)
    return ast.fix_missing_locations(probe)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with probes, and keeps its bytecode in a folder of its own."""

    def get_code(self, fullname: str):
        before = sys.pycache_prefix
        sys.pycache_prefix = _bytecode_folder()
        try:
            return super().get_code(fullname)
        finally:
            sys.pycache_prefix = before

    def source_to_code(self, data, path: str, *, _optimization: int = -1):
        return compile(Probes().visit(ast.parse(data)), path, "exec", dont_inherit=True)

    def exec_module(self, module) -> None:
        setattr(module, _NAME, _FOUND.setdefault(self.path, {}))
        super().exec_module(module)


@functools.cache
def _bytecode_folder() -> str:
    """Other probes, other bytecode."""
    probes = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    return str(ROOT / ".pytest_cache" / "line_probes" / probes)


class _Finder(importlib.machinery.PathFinder):
    """Finds the modules that are measured."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target=None):
        if fullname.split(".")[0] not in PACKAGES:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def start() -> None:
    """Measure the modules that are imported from now on; nothing where ``VARIABLE`` is not set."""
    if not os.environ.get(VARIABLE):
        return
    imported = [name for name in sys.modules if name.split(".")[0] in PACKAGES]
    assert not imported, f"imported before they could be measured: {imported}"
    sys.meta_path.insert(0, _Finder)
    _measure_interpreted_kernels()


def _measure_interpreted_kernels() -> None:
    """Triton's interpreter compiles kernels from their source once more."""
    try:
        from triton.runtime.interpreter import FunctionRewriter
    except ImportError:  # another release; their lines count as missing
        return
    original = FunctionRewriter._transform_ast

    def transform(self, *arguments):
        tree = original(self, *arguments)
        return Probes().visit(tree) if _NAME in self.fn.__globals__ else tree

    FunctionRewriter._transform_ast = transform


def write() -> None:
    """Write what was found to a file of this process beside ``$COVERAGE_FILE``."""
    if not os.environ.get(VARIABLE):
        return
    from coverage import CoverageData

    data = CoverageData(os.environ.get("COVERAGE_FILE", ".coverage"), suffix=True)
    files = _measured_files()
    data.add_lines({path: list(_FOUND[path]) for path in files if path in _FOUND})
    # What nobody imports is missing as a whole.
    data.touch_files(files)
    data.write()


def _measured_files() -> list[str]:
    """All but those that the settings of coverage leave out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]
    files = [str(path) for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    left_out = [str(ROOT / pattern) for pattern in settings["omit"]]
    return [file for file in files if not any(fnmatch(file, p) for p in left_out)]
