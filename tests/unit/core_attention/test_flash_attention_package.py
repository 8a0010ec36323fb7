"""Which installations of flash-attn-4 are taken: packages made for the purpose on ``sys.path``."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from absorbed_mla.core_attention.backends import flash_attention_4 as flash_attention


class Packages:
    """A folder of packages, the first one to be searched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def metadata(self, version: str) -> None:
        """What pip leaves beside the package."""
        folder = self.folder / f"flash_attn_4-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)

    def package(self, interface: str, init: str = "", cute: str = "") -> None:
        """``flash_attn.cute.interface`` and the two packages that it is in."""
        folder = self.folder / "flash_attn" / "cute"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text(init)
        (folder / "__init__.py").write_text(cute)
        (folder / "interface.py").write_text(interface)


FUNCTIONS = "def _flash_attn_fwd(): ...\ndef _flash_attn_bwd(): ...\n"


class TestRefusals:
    """Whatever is wrong with the package is a reason: "auto" has other backends to take."""

    @pytest.fixture()
    def packages(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(str(tmp_path))
        real = {name: sys.modules.pop(name) for name in self.loaded()}
        flash_attention.refusal.cache_clear()
        yield Packages(tmp_path)
        for name in self.loaded():
            del sys.modules[name]
        sys.modules.update(real)
        flash_attention.refusal.cache_clear()

    def loaded(self) -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "flash_attn"]

    def test_none(self, packages):
        packages.metadata("4.0.0b36")
        packages.package(FUNCTIONS)
        assert flash_attention.refusal(192, 128) is None
        assert "head widths (200, 128)" in flash_attention.refusal(200, 128)

    def test_not_installed(self, packages, monkeypatch):
        def absent(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", absent)
        assert flash_attention.refusal(192, 128) == "flash-attn-4 is not installed"

    def test_metadata_without_a_package(self, packages, monkeypatch):
        packages.metadata("4.0.0b36")
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        reason = flash_attention.refusal(192, 128)
        assert "4.0.0b36 cannot be imported" in reason and "flash_attn" in reason

    @pytest.mark.parametrize("version", ["2.8.3", "4.0.0b35", "4.0.0a99"])
    def test_another_version(self, packages, version):
        """Its functions, which are not public, may take other arguments."""
        packages.metadata(version)
        packages.package(FUNCTIONS)
        reason = flash_attention.refusal(192, 128)
        assert "4.0.0b36 or newer" in reason and version in reason

    @pytest.mark.parametrize("version", ["4.0.0b37", "4.0.0rc1", "4.0.0", "4.1.2"])
    def test_a_newer_version(self, packages, version):
        packages.metadata(version)
        packages.package(FUNCTIONS)
        assert flash_attention.refusal(192, 128) is None

    @pytest.mark.parametrize("init", ["import flash_attn_2_cuda", "raise OSError('libcuda.so')"])
    def test_flash_attention_2_of_another_build(self, packages, init):
        """It has the same name, and is imported first."""
        packages.metadata("4.0.0b36")
        packages.package(FUNCTIONS, init=init)
        reason = flash_attention.refusal(192, 128)
        assert "cannot be imported" in reason
        assert "flash_attn_2_cuda" in reason or "OSError: libcuda.so" in reason

    @pytest.mark.parametrize("where", ["cute", "interface"])
    def test_a_dependency_is_missing(self, packages, where):
        packages.metadata("4.0.0b36")
        packages.package(**{"interface": FUNCTIONS, where: "import no_such_cutlass"})
        reason = flash_attention.refusal(192, 128)
        assert "cannot be imported" in reason and "no_such_cutlass" in reason

    def test_no_cute(self, packages):
        packages.metadata("4.0.0b36")
        (packages.folder / "flash_attn").mkdir()
        (packages.folder / "flash_attn" / "__init__.py").touch()
        assert "flash_attn.cute" in flash_attention.refusal(192, 128)

    def test_other_functions(self, packages):
        packages.metadata("4.0.0b36")
        packages.package("def _flash_attn_fwd(): ...\n")
        assert "has no _flash_attn_bwd" in flash_attention.refusal(192, 128)
