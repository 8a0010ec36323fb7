"""What a wheel holds, and that every way of installing gives the same import paths.

Nothing here needs a network or pip: the build backend is called directly, in a copy of the tree,
and imports are looked up in interpreters that see no other site-packages (-S).
"""

import ast
import functools
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import absorbed_mla
import checkpoint_conversion
from absorbed_mla import convert_command
from tests.support.environment import run_python
from tests.unit.project.test_imports import import_graph, imported

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"absorbed_mla", "specs", "checkpoint_conversion"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

LOCATE = """
import importlib.util, site, sys
for folder in sys.argv[1:]:
    site.addsitedir(folder)
for name in ("absorbed_mla.options", "specs.absorbed_mla_layer_specs", "checkpoint_conversion"):
    # Without running absorbed_mla/__init__.py, which imports torch.
    parent, _, leaf = name.rpartition(".")
    if parent == "absorbed_mla":
        folders = importlib.util.find_spec(parent).submodule_search_locations
        print(folders[0] + "/" + leaf + ".py")
    else:
        print(importlib.util.find_spec(name).origin)
"""


def output_of(*args: str, cwd: Path, path: Sequence[Path] = ()) -> str:
    done = run_python(*args, cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def locate(cwd: Path, *site_dirs: Path, path: Sequence[Path] = ()) -> list[str]:
    """Files that the three packages are found in."""
    return output_of("-S", "-c", LOCATE, *site_dirs, cwd=cwd, path=path).splitlines()


def expected_under(folder: Path) -> list[str]:
    return [
        str(folder / "absorbed_mla/options.py"),
        str(folder / "specs/absorbed_mla_layer_specs.py"),
        str(folder / "checkpoint_conversion/__init__.py"),
    ]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the files that git tracks or would track, to build in."""
    copy = tmp_path_factory.mktemp("checkout with space") / "absorbed_mla"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "tests", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def build(checkout: Path, kind: str, target: Path) -> Path:
    call = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    output_of("-c", call, cwd=checkout)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> zipfile.ZipFile:
    with zipfile.ZipFile(build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


class TestWheel:
    @staticmethod
    def text(wheel: zipfile.ZipFile, end: str) -> str:
        """Of the one file with this end of its name."""
        (name,) = (name for name in wheel.namelist() if name.endswith(end))
        return wheel.read(name).decode()

    def test_files(self, wheel):
        """tests/ and scripts/ would become packages of everybody's environment."""
        found = set(wheel.namelist())
        top = {name.split("/")[0] for name in found}
        assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
        sources = {
            str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
        }
        assert sources | {"absorbed_mla/py.typed"} <= found
        # With an __init__.py it would hide, or be hidden by, another distribution's specs.
        assert "specs/__init__.py" not in found
        assert "Apache License" in self.text(wheel, "licenses/LICENSE")

    def test_metadata(self, wheel):
        metadata = self.text(wheel, "/METADATA")
        assert "License-Expression: Apache-2.0" in metadata
        required = re.findall(r"^Requires-Dist: ([\w-]+)", metadata, re.MULTILINE)
        assert {"torch", "megatron-core", "einops", "triton"} <= set(required)
        assert "apex" not in required  # the package of that name is not NVIDIA's

    def test_version(self, wheel):
        """Conversions record it, also from a checkout that nobody installed."""
        version = re.search(r"^Version: (.+)$", self.text(wheel, "/METADATA"), re.MULTILINE)[1]
        assert absorbed_mla.__version__ == checkpoint_conversion.__version__ == version
        # Its changes are described.
        assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)

    def test_console_script(self, wheel):
        scripts = self.text(wheel, "/entry_points.txt")
        assert "absorbed-mla-convert = absorbed_mla.convert_command:main" in scripts
        assert callable(convert_command.main)


class TestImportPaths:
    def test_wheel(self, wheel, tmp_path):
        wheel.extractall(tmp_path / "site")
        assert locate(tmp_path, tmp_path / "site") == expected_under(tmp_path / "site")

    def test_editable(self, checkout, tmp_path):
        with zipfile.ZipFile(build(checkout, "editable", tmp_path)) as archive:
            archive.extractall(tmp_path / "site")
        assert locate(tmp_path, tmp_path / "site") == expected_under(checkout)
        # Also for a program beside the checkout, whose folder has the name of the package.
        assert locate(checkout.parent, tmp_path / "site") == expected_under(checkout)

    def test_pythonpath(self, checkout, tmp_path):
        assert locate(tmp_path, path=[checkout]) == expected_under(checkout)

    def test_beside_another_specs(self, checkout, tmp_path):
        (tmp_path / "specs").mkdir()
        (tmp_path / "specs" / "other.py").touch()
        found = locate(tmp_path, path=[tmp_path, checkout])
        assert found == expected_under(checkout)


def test_a_missing_megatron_is_named(tmp_path):
    """On Python 3.11 pip does not install it, because its metadata exclude 3.11."""
    program = """
import sys
sys.modules["megatron"] = None  # as if it were not there
try:
    from absorbed_mla import AbsorbedMLASelfAttention
except ImportError as error:
    print(error)
"""
    printed = output_of("-c", program, cwd=tmp_path, path=[ROOT])
    assert "absorbed_mla.AbsorbedMLASelfAttention needs megatron-core: pip install" in printed
    assert "--ignore-requires-python" in printed


class TestDependencies:
    GRAPH = staticmethod(functools.cache(lambda: import_graph(ROOT)))

    def imported_by(self, package: str, but_not: str = " ") -> set[str]:
        """Top-level names of other packages that are imported anywhere in the package."""
        graph = self.GRAPH()
        modules = [name for name in graph if f"{name}.".startswith(f"{package}.")]
        modules = [name for name in modules if not f"{name}.".startswith(f"{but_not}.")]
        found = {name.split(".")[0] for module in modules for name in graph[module]}
        return found - set(sys.stdlib_module_names)

    @staticmethod
    def extra(*names: str) -> set[str]:
        """Names of the modules that optional dependencies bring."""
        lines = [line for name in names for line in PROJECT["optional-dependencies"][name]]
        return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}

    DECLARED = frozenset({"torch", "megatron", "numpy", "einops", "packaging", "triton", "xxhash"})

    @pytest.mark.parametrize("package", ["absorbed_mla", "specs"])
    def test_nothing_undeclared_is_imported(self, package):
        imported = self.imported_by(package, but_not="absorbed_mla.serving") - PACKAGES
        assert imported <= self.DECLARED | {"transformer_engine", "flash_attn"}

    def test_generation_and_server_import_their_extras(self):
        # tokenizers comes with transformers.
        allowed = self.DECLARED | PACKAGES | self.extra("generate", "structured") | {"tokenizers"}
        assert (
            self.imported_by("absorbed_mla.serving", but_not="absorbed_mla.serving.server")
            <= allowed
        )
        assert self.imported_by("absorbed_mla.serving.server") <= allowed | self.extra("serve")

    def test_scripts_import_their_extra(self):
        """``scripts`` brings all that the scripts of a checkout import, benchmarks aside."""
        folder = ROOT / "scripts"
        own = {path.stem for path in folder.iterdir()}
        parts = own - {"benchmarks", "checks"}
        files = [path for name in parts for path in (folder / name).glob("*.py")]
        trees = [ast.parse(path.read_text()) for path in (*files, *folder.glob("*.py"))]
        names = imported(node for tree in trees for node in ast.walk(tree))
        found = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
        assert {"matplotlib", "openai", "transformers"} <= found
        allowed = self.DECLARED | self.extra("scripts", "generate")
        assert found - own - PACKAGES <= allowed

    def test_conversion_imports_its_extra_alone(self):
        """Whoever only converts needs nothing of Megatron's; comparing logits needs everything."""
        imported = self.imported_by("checkpoint_conversion")
        # numpy comes with torch's tensors, tokenizers with transformers.
        known = self.extra("conversion") | {"torch", "numpy", "tokenizers", "megatron"} | PACKAGES
        assert {"torch", "safetensors", "xxhash", "rich"} <= imported <= known
