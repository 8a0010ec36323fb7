"""The prefix cache on disk: what a later engine finds there, and what it refuses."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.generation.options import EngineOptions
from absorbed_mla.generation.prefix.block_file import BlockLayout, read_block, write_block
from absorbed_mla.generation.prefix.fingerprint import weights_digest
from absorbed_mla.generation.prefix.folder import PrefixFolder
from absorbed_mla.options import AbsorbedMLAOptions
from tests.support.engine import (
    Request,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    generating_model,
    prompt,
)

# Two whole blocks and a part of a third.
TEXT = prompt(150, seed=3)
REQUEST = Request(TEXT, 6)
LONGER = Request([*TEXT, *prompt(60, seed=4)], 6)


@pytest.fixture(scope="module")
def model():
    return generating_model()


@pytest.fixture(scope="module")
def expected(model):
    return by_whole_forwards(model, [REQUEST])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prefixes"


def run(model, folder, *requests, **options):
    """One engine's life; the statistics, and how many prompt tokens were computed."""
    changes = {"prefix_caching": True, "prefix_cache_dir": folder, "step_tokens": 256, **options}
    engine = engine_of(model, **changes)
    with engine:
        done = generate(engine, requests or [REQUEST], log_probs=True)
        computed = engine.host.context.lifetime_prefill_token_count
    engine.close()
    return done, computed


def files_in(folder):
    return sorted(folder.glob("*/*.safetensors"))


class TestRestart:
    def test_finds_the_prefix(self, model, expected, folder):
        first, computed = run(model, folder)
        assert (computed, first.statistics.disk_blocks) == (150, 0)
        assert len(files_in(folder)) == 2
        again, computed = run(model, folder)
        assert (computed, again.statistics.disk_blocks) == (150 - 128, 2)
        assert_generates(again, expected)

    def test_continues_a_chain(self, model, folder):
        """The second engine writes what is new, the third finds both."""
        run(model, folder)
        longer, computed = run(model, folder, LONGER)
        assert (computed, longer.statistics.disk_blocks) == (210 - 128, 2)
        assert len(files_in(folder)) == 3
        _, computed = run(model, folder, LONGER, chunked_prefill=True, step_tokens=64)
        assert computed == 210 - 192

    def test_bits_of_the_memory(self, model, folder):
        """A block from the folder is the block that a request left in the cache."""
        options = {"prefix_caching": True, "prefix_cache_dir": folder}
        with engine_of(model, **options) as engine:
            generate(engine, [REQUEST])
            warm = generate(engine, [REQUEST], log_probs=True)
        assert (warm.statistics.prefix_blocks, warm.statistics.disk_blocks) == (2, 0)
        found, _ = run(model, folder)
        assert found.statistics.disk_blocks == 2
        assert found.results == warm.results

    @pytest.mark.skipif(torch.cuda.is_available(), reason="parity mode has no fp32 on a GPU")
    def test_bits_without_it_in_parity_mode(self, folder):
        with batch_invariant_mode():
            parity = generating_model(AbsorbedMLAOptions(batch_invariant=True))
            without = generate(engine_of(parity), [REQUEST], log_probs=True)
            run(parity, folder)
            found, _ = run(parity, folder)
        assert found.statistics.disk_blocks == 2
        assert found.results == without.results

    def test_rows_in_fp8(self, folder):
        """The bytes of the cache, whatever they stand for."""
        model = generating_model(AbsorbedMLAOptions(latent_cache_dtype="fp8"))
        cold, _ = run(model, folder)
        found, _ = run(model, folder)
        assert found.statistics.disk_blocks == 2
        assert found.results[0].tokens == cold.results[0].tokens

    def test_several_requests(self, model, folder):
        """Some of them share a beginning, in a cache too small for all."""
        requests = [Request(prompt(100 + i, i, shared=70), 5) for i in range(5)]
        requests += [REQUEST, LONGER]
        wanted = by_whole_forwards(model, requests)
        for _ in range(2):
            done, _ = run(model, folder, *requests, blocks=9)
            assert_generates(done, wanted)
        assert done.statistics.disk_blocks >= 4

    def test_evicted_blocks(self, model, folder):
        """They are written when they are evicted, and come back into the same engine."""
        others = [Request(prompt(150, seed), 6) for seed in range(10, 13)]
        options = {"prefix_caching": True, "prefix_cache_dir": folder, "blocks": 6}
        with engine_of(model, **options) as engine:
            for request in [REQUEST, *others]:
                generate(engine, [request])
            assert generate(engine, [REQUEST]).statistics.disk_blocks == 2

    def test_room_is_not_taken_from_the_own_beginning(self, model, folder):
        """Blocks read for a request evict others, not its oldest ones, which it needs as well."""
        whole = Request([*TEXT, *prompt(250, seed=5)], 6)
        options = {"max_sequence_length": 448, "step_tokens": 448, "blocks": 7}
        run(model, folder, whole, **options)
        options |= {"prefix_caching": True, "prefix_cache_dir": folder}
        with engine_of(model, **options) as engine:
            for request in (REQUEST, Request(prompt(150, seed=6), 6)):
                generate(engine, [request])
            done = generate(engine, [whole], log_probs=True)
        assert (done.statistics.prefix_blocks, done.statistics.disk_blocks) == (6, 4)
        assert_generates(done, by_whole_forwards(model, [whole]))

    def test_safetensors_reads_it(self, model, folder):
        from safetensors.torch import load_file

        run(model, folder)
        config = model.config
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        for path in files_in(folder):
            found = load_file(path)
            assert {n: tuple(t.shape) for n, t in found.items()} == {"latents": (2, 64, width)}


class TestOtherModels:
    def test_changed_weights(self, folder):
        model = generating_model(num_layers=1)
        run(model, folder)
        _, computed = run(model, folder)
        assert computed == 22
        with torch.no_grad():  # without a trace in the tensor's version
            model.decoder.layers[0].mlp.linear_fc2.weight.data[0, 0] += 1e-3
        wanted = by_whole_forwards(model, [REQUEST])
        changed, computed = run(model, folder)
        assert (computed, changed.statistics.disk_blocks) == (150, 0)
        assert_generates(changed, wanted)

    def test_one_engine_over_an_update(self, folder):
        model = generating_model(num_layers=1)
        engine = engine_of(model, prefix_caching=True, prefix_cache_dir=folder)
        assert generate(engine, [REQUEST]).statistics.disk_blocks == 0
        assert generate(engine, [REQUEST]).statistics.disk_blocks == 2
        with torch.no_grad():
            model.embedding.word_embeddings.weight.mul_(1.01)
        run_ = generate(engine, [REQUEST])
        assert run_.statistics.disk_blocks == 0
        assert_generates(run_, by_whole_forwards(model, [REQUEST]))

    @pytest.mark.parametrize(
        "changes", [{"num_layers": 3}, {"layernorm_epsilon": 1e-3}, {"rotary_base": 5000}]
    )
    def test_other_models(self, model, folder, changes):
        run(model, folder)
        _, computed = run(generating_model(**changes), folder)
        assert computed == 150

    def test_digest_sees_every_word(self):
        """Also where two changes would cancel out in a plain sum, and beside the last word."""
        layer = torch.nn.Linear(7, 3, bias=True).bfloat16()
        digests = {weights_digest(layer)}
        with torch.no_grad():
            for parameter in layer.parameters():
                for i in range(parameter.numel()):
                    flat = parameter.view(-1)
                    flat[i] += 1.0
                    digests.add(weights_digest(layer))
            layer.weight.copy_(layer.weight.roll(1, 0))
        digests.add(weights_digest(layer))
        assert len(digests) == 1 + 21 + 3 + 1


class TestDamage:
    @pytest.mark.parametrize("place", [2, 40, -5])
    def test_flipped_byte(self, model, expected, folder, place, caplog):
        """In the header's length, in the header, and in the latents."""
        run(model, folder)
        for path in files_in(folder):
            data = bytearray(path.read_bytes())
            data[place] ^= 4
            path.write_bytes(data)
        with caplog.at_level(logging.WARNING):
            done, computed = run(model, folder)
        assert computed == 150
        assert_generates(done, expected)
        warnings = [r for r in caplog.records if "prefix_cache_dir" in r.getMessage()]
        assert len(warnings) == 1
        # What was read is written anew; a file behind a damaged one may not have been.
        computed = [run(model, folder)[1] for _ in range(2)]
        assert computed[1] == 22

    def test_foreign_files(self, model, expected, folder):
        """Another block's file under this name, a short one, and files of other programs."""
        run(model, folder)
        first, second = files_in(folder)
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data[:100])
        (folder / "notes.txt").write_text("mine")
        done, computed = run(model, folder)
        assert computed == 150
        assert_generates(done, expected)
        assert (folder / "notes.txt").exists()

    def test_second_block_damaged(self, model, expected, folder):
        """Only the blocks before it are used."""
        run(model, folder)
        newest = max(files_in(folder), key=os.path.getmtime)
        [other] = set(files_in(folder)) - {newest}
        other.write_bytes(other.read_bytes()[:-1])
        done, computed = run(model, folder)
        assert (computed, done.statistics.disk_blocks) == (150 - 64, 1)
        assert_generates(done, expected)


LAYOUT = BlockLayout({"latents": (2, 4), "index_keys": (1, 3)}, torch.bfloat16)
NAME = "0123456789abcdef" * 2
KEY = {"fingerprint": NAME, "tokens": f"{1:016x}"}


def block(value: float) -> dict[str, torch.Tensor]:
    return {n: torch.full(s, value).bfloat16() for n, s in LAYOUT.shapes.items()}


class TestFolder:
    def test_bound(self, tmp_path):
        write_block(one := tmp_path / "one", block(0), LAYOUT, KEY)
        size = one.stat().st_size
        folder = PrefixFolder(tmp_path, NAME, LAYOUT, 3 * size)
        for number in (1, 2, 3):
            folder.write(number, block(number))
        folder.flush()
        folder.touch([1])
        # Another process, of other weights.
        other = PrefixFolder(tmp_path, NAME[::-1], LAYOUT, 3 * size)
        other.write(4, block(4))
        other.close()
        assert [n for n in (1, 2, 3) if folder.has(n)] == [1, 3] and other.has(4)
        assert [float(found["latents"][0, 0]) for found in folder.read([1])] == [1.0]
        assert list(folder.read([2, 3])) == []
        folder.close()

    def test_chain_is_deleted_from_its_end(self, tmp_path):
        folder = PrefixFolder(tmp_path, NAME, LAYOUT, 10**6)
        for number in (1, 2, 3, 4):
            folder.write(number, block(number))
        folder.flush()
        folder.touch([1, 2, 3, 4])
        size = next(tmp_path.glob("*/*.safetensors")).stat().st_size
        small = PrefixFolder(tmp_path, NAME, LAYOUT, 2 * size)
        small.close()
        assert [folder.has(n) for n in (1, 2, 3, 4)] == [True, True, False, False]
        folder.close()

    def test_processes_share_it(self, tmp_path):
        """Each writes the same files again and again, and never sees a part of one."""
        folders = [PrefixFolder(tmp_path, NAME, LAYOUT, 10**6) for _ in range(2)]
        folders[0].write(1, block(1))
        folders[0].flush()
        for _ in range(100):
            for folder in folders:
                folder.write(1, block(1))
            for folder in folders:
                [found] = folder.read([1])
                assert float(found["latents"].sum()) == 8.0
        for folder in folders:
            folder.close()
        assert len(list((tmp_path / NAME).iterdir())) == 1

    def test_leftovers_are_removed(self, tmp_path):
        (tmp_path / NAME).mkdir()
        for name, age in ((".old.1.0", 7200), (".new.1.0", 0)):
            path = tmp_path / NAME / name
            path.touch()
            os.utime(path, (path.stat().st_mtime - age,) * 2)
        PrefixFolder(tmp_path, NAME, LAYOUT, 100).close()
        assert [path.name for path in (tmp_path / NAME).iterdir()] == [".new.1.0"]

    def test_what_cannot_be_written(self, tmp_path, caplog):
        (tmp_path / NAME).write_text("a file in the folder's place")
        folder = PrefixFolder(tmp_path, NAME, LAYOUT, 100)
        with caplog.at_level(logging.WARNING):
            folder.write(1, block(1))
            folder.write(2, block(2))
            folder.close()
        assert len(caplog.records) == 1 and not folder.has(1)

    def test_same_bits(self, tmp_path):
        odd = {"latents": torch.randn(2, 4).bfloat16(), "index_keys": torch.randn(1, 3).bfloat16()}
        odd["latents"][0, 0] = float("nan")
        write_block(tmp_path / "one", odd, LAYOUT, KEY)
        again = read_block(tmp_path / "one", LAYOUT, KEY)
        for name, tensor in odd.items():
            assert torch.equal(tensor.view(torch.int16), again[name].view(torch.int16))


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"prefix_caching": False}, "prefix_cache_dir needs prefix_caching=True, got False"),
            ({"decode_context_parallel": True}, "needs decode_context_parallel=False, got True"),
            (
                {
                    "inference_config": {
                        "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.REF_ZERO
                    }
                },
                "prefix_cache_dir needs prefix_caching_eviction_policy",
            ),
            ({"prefix_cache_bytes": 0}, "prefix_cache_bytes must be at least 1, got 0"),
        ],
    )
    def test_options(self, changes, error):
        sizes = {"max_sequence_length": 100, "max_requests": 2, "prefix_cache_dir": "somewhere"}
        with pytest.raises(ValueError, match=error):
            EngineOptions(**{**sizes, **changes})

    def test_bound_below_a_block(self, model, folder):
        with pytest.raises(ValueError, match=r"prefix_cache_bytes must be at least a block's"):
            engine_of(model, prefix_caching=True, prefix_cache_dir=folder, prefix_cache_bytes=99)

    def test_no_folder(self, model, tmp_path):
        (tmp_path / "file").touch()
        options = {"prefix_caching": True, "prefix_cache_dir": tmp_path / "file"}
        with pytest.raises(ValueError, match="prefix_cache_dir must be a folder that can be"):
            engine_of(model, **options)


def test_without_safetensors(model, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="prefix_cache_dir needs the package safetensors"):
        engine_of(model, prefix_caching=True, prefix_cache_dir=folder)
