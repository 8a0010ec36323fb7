"""Which backend attends over the paged cache, and FlashMLA's, whose package is stood in for."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.inference import backend as paged_backends
from absorbed_mla.inference.backend import PagedRequest, choose
from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.log_once import times_logged
from absorbed_mla.registry import PAGED_BACKENDS
from tests.support.paged import PagedCase

ON_CPU = PagedRequest(torch.device("cpu"), torch.float32, 8, 32, 16, 16)
FLASH_MLA = PAGED_BACKENDS["flash_mla"]
DEEP = PagedRequest(torch.device("cuda"), torch.bfloat16, 128, 512, 64, 64)


class TestChoice:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("flash", "paged_attention_backend must be one of auto, flash_mla, .*; got 'flash'"),
            ("flash_mla", "'flash_mla' cannot run here: flash_mla: it needs a GPU"),
        ],
    )
    def test_refused(self, name, message):
        with pytest.raises(ValueError, match=message):
            choose(name, ON_CPU)

    def test_auto_says_once_what_it_took(self, caplog, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        times_logged.cache_clear()
        with caplog.at_level("INFO"):
            assert {choose("auto", ON_CPU).name for _ in range(3)} == {"reference"}
        assert len(caplog.records) == 1
        assert "flash_mla: it needs a GPU; hopper: it" in caplog.text

    @pytest.mark.parametrize("machine", ["NVIDIA H200", "a GPU that was not measured"])
    def test_auto_takes_the_fastest(self, monkeypatch, machine):
        """By measured rate; on other GPUs in the order of an H200."""
        monkeypatch.setattr(paged_backends, "machine_name", lambda device: machine)
        order, able = [], list(PAGED_BACKENDS)
        monkeypatch.setattr(PAGED_BACKENDS, "examine", lambda name, request: (able, {}))
        while able:
            order.append(choose("auto", DEEP))
            able.remove(order[-1])
        assert [each.name for each in order] == ["hopper", "flash_mla", "triton", "reference"]

    def test_a_new_backend_is_one_entry(self):
        """Registered, it is chosen by its name and, where it is the fastest, by "auto"."""
        entry = SimpleNamespace(name="toy", rates={"cpu": (1e9, 1e9)}, why_not=lambda request: None)
        with PAGED_BACKENDS.registered(entry):
            assert choose("toy", ON_CPU) is choose("auto", ON_CPU) is entry

    def test_the_interpreter_is_taken_only_where_it_is_named(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert choose("triton", ON_CPU).name == "triton"
        assert choose("auto", ON_CPU).name == "reference"
        odd = replace(ON_CPU, kv_lora_rank=48)
        assert "powers of two" in PAGED_BACKENDS["triton"].why_not(odd)

    @pytest.mark.parametrize(
        ("name", "change", "reason"),
        [
            ("hopper", {"dtype": torch.float32}, "fp16 and bf16"),
            ("hopper", {"block_size": 100}, "a multiple of 16; the cache has 100"),
            ("hopper", {"qk_rope_head_dim": 16}, "widths 512 (latent) and 16 (rope)"),
            ("flash_mla", {"dtype": torch.float16}, "bf16"),
            ("flash_mla", {"batch_invariant": True}, "batch_invariant=True"),
            ("flash_mla", {"windowed": True}, "not a part of them"),
            ("flash_mla", {"block_size": 16}, "block size of 64; the cache has 16"),
            ("flash_mla", {"qk_rope_head_dim": 32}, "widths 512 (latent) and 32 (rope)"),
        ],
    )
    def test_why_not(self, name, change, reason):
        assert reason in PAGED_BACKENDS[name].why_not(replace(DEEP, **change))

    @pytest.mark.parametrize("name", ["hopper", "flash_mla"])
    @pytest.mark.parametrize("change", [{}, {"dtype": torch.float32, "block_size": 5}])
    def test_a_missing_gpu_is_the_first_reason(self, name, change):
        """Another dtype or block size would not help."""
        request = replace(DEEP, device=torch.device("cpu"), **change)
        assert PAGED_BACKENDS[name].why_not(request) == "it needs a GPU"

    def test_flash_mla_must_be_importable(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setitem(sys.modules, "flash_mla", None)
        assert "cannot be imported" in FLASH_MLA.why_not(DEEP)
        monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace())
        assert FLASH_MLA.why_not(DEEP) is None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        assert "9.0" in FLASH_MLA.why_not(DEEP)


def decode_of_flash_mla(
    q, k_cache, table, lengths, width, schedule, splits, *, softmax_scale, causal
):
    """What FlashMLA's dense decode gives, from its documentation; LSE +inf without keys.

    Written out per token: the causal mask is aligned to the last key and the last place.
    """
    assert causal and (schedule, splits) == ("schedule", "splits")
    rows, places, heads, _ = q.shape
    out = torch.full((rows, places, heads, width), torch.nan)
    lse = torch.full((rows, heads, places), torch.inf)
    block_size = k_cache.shape[1]
    for row in range(rows):
        for place in range(places):
            seen = int(lengths[row]) - (places - 1 - place)
            if seen <= 0:
                continue
            position = torch.arange(seen)
            key = k_cache[table[row, position // block_size], position % block_size, 0]
            scores = q[row, place] @ key.T * softmax_scale
            out[row, place] = scores.softmax(-1) @ key[:, :width]
            lse[row, :, place] = scores.logsumexp(-1)
    return out, lse


class TestFlashMLA:
    """Places of rows shorter than the longest, in FlashMLA's layout and back."""

    @pytest.fixture(autouse=True)
    def _package(self, monkeypatch):
        def get_mla_metadata(lengths, heads, key_heads):
            places = self.rows.max_query_length
            assert (lengths.dtype, heads, key_heads) == (torch.int32, places * 4, 1)
            return "schedule", "splits"

        package = SimpleNamespace(
            get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=decode_of_flash_mla
        )
        monkeypatch.setitem(sys.modules, "flash_mla", package)

    @pytest.mark.parametrize("query_lengths", [(1, 1, 0, 1), (1, 3, 0, 2), (0, 0, 0, 0)])
    def test_places(self, query_lengths):
        case = PagedCase(query_lengths, (70, 3, 0, 9), heads=4, dtype=torch.float32, padding=2)
        inputs = case.inputs()
        self.rows = inputs[3]
        found, expected = FLASH_MLA.forward(*inputs), paged_reference(*inputs)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)

    def test_a_window_is_no_silent_surprise(self):
        inputs = PagedCase((1,), (70,), heads=4).inputs()
        self.rows = inputs[3]
        with pytest.raises(ValueError, match="0 to 64"):
            FLASH_MLA.forward(*inputs, 0, 64)
