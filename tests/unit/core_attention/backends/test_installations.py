"""Which installations of attention packages are accepted.

A missing or broken package is a reason that the backend reports, not an error: "auto" falls back.
"""

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from absorbed_mla.core_attention.backends import flash_attention_4
from absorbed_mla.core_attention.backends import transformer_engine as te
from tests.support.backends import attention_request, determinism, why_not
from tests.support.fake_packages import transformer_engine


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.6.0")


@pytest.fixture
def no_metadata(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)


FUNCTIONS = "def _flash_attn_fwd(): ...\ndef _flash_attn_bwd(): ...\n"


class TestFlashAttention4:
    """Small packages written to a folder at the front of ``sys.path``."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path))
        real = {name: sys.modules.pop(name) for name in self.loaded()}
        flash_attention_4.why_not_installed.cache_clear()
        yield tmp_path
        for name in self.loaded():
            del sys.modules[name]
        sys.modules.update(real)
        flash_attention_4.why_not_installed.cache_clear()

    def loaded(self) -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "flash_attn"]

    def install(self, folder: Path, version: str = "4.0.0b36", **files: str) -> None:
        """Write pip's metadata, and ``flash_attn.cute.interface`` with its parents."""
        metadata = folder / f"flash_attn_4-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\n")
        cute = folder / "flash_attn" / "cute"
        cute.mkdir(parents=True)
        (cute.parent / "__init__.py").write_text(files.get("init", ""))
        (cute / "__init__.py").write_text(files.get("cute", ""))
        (cute / "interface.py").write_text(files.get("interface", FUNCTIONS))

    @pytest.mark.parametrize("version", ["4.0.0b36", "4.0.0b37", "4.0.0rc1", "4.0.0", "4.1.2"])
    def test_taken(self, folder, version):
        self.install(folder, version)
        assert flash_attention_4.why_not_installed(192, 128) is None
        assert "head widths (200, 128)" in flash_attention_4.why_not_installed(200, 128)

    def test_not_installed(self, no_metadata):
        assert flash_attention_4.why_not_installed(192, 128) == "flash-attn-4 is not installed"

    @pytest.mark.parametrize("version", ["2.8.3", "4.0.0b35", "4.0.0a99"])
    def test_another_version(self, folder, version):
        """Its functions, which are not public, may take other arguments."""
        self.install(folder, version)
        reason = flash_attention_4.why_not_installed(192, 128)
        assert "4.0.0b36 or newer" in reason and version in reason

    @pytest.mark.parametrize(
        ("files", "parts"),
        [
            # FlashAttention-2 of another build has the same name.
            ({"init": "import flash_attn_2_cuda"}, ("flash_attn_2_cuda",)),
            ({"init": "raise OSError('libcuda.so')"}, ("OSError: libcuda.so",)),
            ({"cute": "import no_such_cutlass"}, ("no_such_cutlass",)),
            ({"interface": "import no_such_cutlass"}, ("no_such_cutlass",)),
        ],
        ids=lambda x: next(iter(x.items()))[1] if isinstance(x, dict) else "",
    )
    def test_broken(self, folder, files, parts):
        self.install(folder, **files)
        reason = flash_attention_4.why_not_installed(192, 128)
        assert "4.0.0b36 cannot be imported" in reason
        assert "nvidia-cutlass-dsl is " in reason and "tested was 4.0.0b36 with 4.8.1" in reason
        assert all(part in reason for part in parts)

    def test_metadata_without_a_package(self, folder, monkeypatch):
        self.install(folder)
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        assert "4.0.0b36 cannot be imported" in flash_attention_4.why_not_installed(192, 128)

    def test_no_cute(self, folder):
        self.install(folder)
        (folder / "flash_attn" / "cute").rename(folder / "elsewhere")
        assert "flash_attn.cute" in flash_attention_4.why_not_installed(192, 128)

    def test_other_functions(self, folder):
        self.install(folder, interface="def _flash_attn_fwd(): ...\n")
        assert "has no _flash_attn_bwd" in flash_attention_4.why_not_installed(192, 128)


class TestTransformerEngine:
    @pytest.fixture(autouse=True)
    def _ask_again(self):
        te.why_not_installed.cache_clear()
        with determinism(demanded=False):
            yield
        te.why_not_installed.cache_clear()

    def reason(self, **changes) -> str | None:
        return why_not("transformer_engine", attention_request("expanded", **changes))

    def test_not_installed(self, no_metadata):
        assert self.reason() == "TransformerEngine is not installed"

    @pytest.mark.parametrize("version", ["2.11.1", "2.14.0", "1.13.0"])
    def test_another_version(self, monkeypatch, version):
        """Its functions take other arguments."""
        transformer_engine.install(monkeypatch, version)
        assert f"{version} is installed" in self.reason()

    @pytest.mark.parametrize("version", ["2.12.0", "2.13.1", "2.12.0+abc"])
    def test_taken(self, monkeypatch, version):
        transformer_engine.install(monkeypatch, version)
        assert self.reason() is None

    @pytest.mark.parametrize("missing", ["transformer_engine_torch", te._INTERFACE])
    def test_broken(self, monkeypatch, missing):
        transformer_engine.install(monkeypatch)
        monkeypatch.setitem(sys.modules, missing, None)
        reason = self.reason()
        assert "2.12.0 cannot be imported" in reason and missing in reason

    def test_old_cudnn(self, monkeypatch):
        transformer_engine.install(monkeypatch, cudnn=90600)
        assert self.reason() == "cuDNN 9.7 or newer is needed, TransformerEngine found 90600"

    @pytest.mark.parametrize(
        ("cudnn", "value_width", "packed", "loaded"),
        [
            (91400, 192, True, "9.14.0"),
            (91400, 256, True, "9.14.0"),
            (91899, 136, True, "9.18.99"),
            (91400, 128, True, None),
            (91400, 192, False, None),
            (91900, 192, True, None),
        ],
    )
    def test_wrong_gradients_of_packs(self, cudnn, value_width, packed, loaded, monkeypatch):
        """An older cuDNN computes wrong gradients for packs of these widths, without an error."""
        transformer_engine.install(monkeypatch, cudnn=cudnn)
        reason = self.reason(key_width=value_width, value_width=value_width, packed=packed)
        if loaded is None:
            assert reason is None
            return
        assert f"TransformerEngine 2.12.0 loaded cuDNN {loaded}" in reason
        assert "cuDNN 9.19 or newer is needed" in reason and f"(here {value_width})" in reason

    def test_no_kernel(self, monkeypatch):
        """The widths, layout, mask and determinism that TransformerEngine is asked about."""
        fused, asked = transformer_engine.install(monkeypatch), []

        def choose(*what):
            asked.append(what)
            name = "No_Backend" if len(asked) == 2 else "F16_arbitrary_seqlen"
            return fused.FusedAttnBackend[name]

        library = sys.modules["transformer_engine_torch"]
        monkeypatch.setattr(library, "get_fused_attn_backend", choose)
        reason = self.reason(deterministic=True)
        assert "(192, 128), layout thd_thd_thd, mask padding_causal_bottom_right" in reason
        assert all(what[12:14] == (192, 128) and what[-1] is True for what in asked)
        assert [what[1] for what in asked] == ["kBFloat16"] * 2
