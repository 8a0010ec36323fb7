"""The prefix cache on disk: what a later engine finds there, and what it refuses."""

import logging
import os
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.prefix_cache import block_file
from absorbed_mla.serving.prefix_cache import folder as prefix_folder
from absorbed_mla.serving.prefix_cache.block_file import BlockLayout, bytes_of, group_name
from absorbed_mla.serving.prefix_cache.block_file import write_group as write_file
from absorbed_mla.serving.prefix_cache.fingerprint import weights_digest
from absorbed_mla.serving.prefix_cache.folder import PrefixFolder
from tests.support.engine import (
    Request,
    add,
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
def expected(model):
    return by_whole_forwards(model, [REQUEST])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prefixes"


def engine_with(folder, model, **options):
    return engine_of(model, **{"prefix_caching": True, "prefix_cache_dir": folder, **options})


def run(model, folder, *requests, **options):
    """One engine's life; the results, and how many prompt tokens were computed."""
    engine = engine_with(folder, model, **{"step_tokens": 256, **options})
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
        assert len(files_in(folder)) == 1
        again, computed = run(model, folder)
        assert (computed, again.statistics.disk_blocks) == (150 - 128, 2)
        assert_generates(again, expected)

    def test_continues_a_chain(self, model, folder):
        """The second engine writes what is new, the third finds both."""
        run(model, folder)
        longer, computed = run(model, folder, LONGER)
        assert (computed, longer.statistics.disk_blocks) == (210 - 128, 2)
        assert len(files_in(folder)) == 2
        _, computed = run(model, folder, LONGER, chunked_prefill=True, step_tokens=64)
        assert computed == 210 - 192

    def test_bits_of_the_memory(self, model, folder):
        """A block from the folder is the block that a request left in the cache."""
        with engine_with(folder, model) as engine:
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
        [result], [expected] = found.results, without.results
        assert (result.num_cached_tokens, expected.num_cached_tokens) == (128, 0)
        assert (result.tokens, result.log_probs) == (expected.tokens, expected.log_probs)

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
        with engine_with(folder, model, blocks=6) as engine:
            for request in [REQUEST, *others]:
                generate(engine, [request])
            assert generate(engine, [REQUEST]).statistics.disk_blocks == 2

    def test_requests_in_flight_are_left_out(self, model, expected, folder):
        """Blocks are known before all their tokens are computed."""
        with engine_with(folder, model, chunked_prefill=True, step_tokens=100) as engine:
            add(engine, [REQUEST], log_probs=True)
            engine.step()
            allocator = engine.host.context.kv_block_allocator
            assert allocator.kv_hash_to_block_id and not files_in(folder)
        assert not files_in(folder)
        done, computed = run(model, folder)
        assert computed == 150
        assert_generates(done, expected)

    def test_a_block_that_has_other_tokens_by_now(self, model, folder):
        """What is cached under a hash is written only where the block still has that hash."""
        with engine_with(folder, model) as engine:
            generate(engine, [REQUEST])
            allocator = engine.host.context.kv_block_allocator
            first, _ = allocator.kv_hash_to_block_id.values()
            allocator.block_hashes[first] = 12345
        [path] = files_in(folder)
        assert load_file(path)["latents"].shape[0] == 1
        done, computed = run(model, folder)
        assert (computed, done.statistics.disk_blocks) == (150, 0)

    def test_the_end_of_a_text_is_evicted_first(self, model, folder):
        """Also of blocks from the folder, whether the one before was there already or came along.

        Megatron finds a block only where all before it are cached.
        """
        run(model, folder, LONGER)
        with engine_with(folder, model, step_tokens=256) as engine:
            for request, blocks in ((REQUEST, 2), (LONGER, 1)):
                assert generate(engine, [request]).statistics.disk_blocks == blocks
            allocator = engine.host.context.kv_block_allocator
            chain = list(allocator.kv_hash_to_block_id)
            # The first block was used longest ago.
            for time, block in enumerate(allocator.kv_hash_to_block_id.values()):
                allocator.block_timestamps[block] = time
            for left in (2, 1, 0):
                assert allocator.evict_lru_blocks(1)
                assert list(allocator.kv_hash_to_block_id) == chain[:left]

    def test_room_is_not_taken_from_the_own_beginning(self, model, folder):
        """Blocks read for a request evict others, not its oldest ones, which it needs as well."""
        whole = Request([*TEXT, *prompt(250, seed=5)], 6)
        options = {"max_sequence_length": 448, "step_tokens": 448, "blocks": 7}
        run(model, folder, whole, **options)
        with engine_with(folder, model, **options) as engine:
            for request in (REQUEST, Request(prompt(150, seed=6), 6)):
                generate(engine, [request])
            done = generate(engine, [whole], log_probs=True)
        assert (done.statistics.prefix_blocks, done.statistics.disk_blocks) == (6, 4)
        assert_generates(done, by_whole_forwards(model, [whole]))

    def test_safetensors_reads_it(self, model, folder):
        run(model, folder)
        config = model.config
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        [found] = map(load_file, files_in(folder))
        assert {n: tuple(t.shape) for n, t in found.items()} == {"latents": (2, 1, 64, width)}


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
        engine = engine_with(folder, model)
        assert generate(engine, [REQUEST]).statistics.disk_blocks == 0
        assert generate(engine, [REQUEST]).statistics.disk_blocks == 2
        with torch.no_grad():
            model.embedding.word_embeddings.weight.mul_(1.01)
        run_ = generate(engine, [REQUEST])
        assert run_.statistics.disk_blocks == 0
        assert_generates(run_, by_whole_forwards(model, [REQUEST]))

    @pytest.mark.parametrize(
        "changes",
        [
            *({"num_layers": 3}, {"layernorm_epsilon": 1e-3}, {"rotary_base": 5000}),
            {"options": AbsorbedMLAOptions(latent_norm_eps=1e-3)},
            {"options": AbsorbedMLAOptions(form="absorbed")},
            {"options": AbsorbedMLAOptions(context_chunk_size=100)},
        ],
    )
    def test_other_models(self, model, folder, changes):
        """Their bits, or values, may be others, also with the same weights and config."""
        run(model, folder)
        changed, computed = run(generating_model(**changes), folder)
        assert (computed, changed.statistics.disk_blocks) == (150, 0)

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
    @pytest.mark.parametrize(("place", "wanted"), [(2, 150), (40, 150), (-5, 150 - 64)])
    def test_flipped_byte(self, model, expected, folder, place, wanted, caplog):
        """In the header's length, in the header, and in the latents of the second block."""
        run(model, folder)
        [path] = files_in(folder)
        flip(path, place, 4)
        with caplog.at_level(logging.WARNING):
            done, computed = run(model, folder)
        assert computed == wanted
        assert_generates(done, expected)
        warnings = [r for r in caplog.records if "prefix_cache_dir" in r.getMessage()]
        assert len(warnings) == 1
        # What was computed was written anew.
        assert run(model, folder)[1] == 22


def flip(path, place: int, bits: int = 1) -> None:
    """Change bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


LAYOUT = BlockLayout({"latents": (2, 4), "index_keys": (1, 3)}, torch.bfloat16)
NAME = "0123456789abcdef" * 2


def opened(root, name: str = NAME, limit: int = 10**6):
    """A folder that is closed at the end of the block."""
    return closing(PrefixFolder(root, name, LAYOUT, limit))


def write_group(path, *hashes: int, layout=LAYOUT, fingerprint=NAME, tensors=None) -> None:
    write_file(path, hashes, tensors or blocks(*hashes), layout, fingerprint)


def blocks(*values: float) -> dict[str, torch.Tensor]:
    """[blocks, *shape] by name, all of one value in each block."""
    whole = torch.tensor(values).bfloat16()
    return {n: whole[:, None, None].repeat(1, *s) for n, s in LAYOUT.shapes.items()}


def write(folder: PrefixFolder, *numbers: int) -> None:
    folder.write(numbers, blocks(*numbers))


def read(folder: PrefixFolder, *numbers: int) -> list[float]:
    found = blocks(*[-1.0] * len(numbers))
    targets = [[[bytes_of(part[i])] for part in found.values()] for i in range(len(numbers))]
    count = folder.read(numbers, targets)
    found = {name: tensor[:count] for name, tensor in found.items()}
    for tensor in found.values():
        assert all((block == block.flatten()[0]).all() for block in tensor)
    assert torch.equal(found["latents"][:, 0, 0], found["index_keys"][:, 0, 0])
    return found["latents"][:, 0, 0].tolist()


def held(folder: PrefixFolder, *numbers: int) -> list[int]:
    folder.leading([])
    return [number for number in numbers if folder.has(number)]


class TestFolder:
    def test_parts_of_files(self, tmp_path):
        """Any run of blocks, over several files and in one, each with one or several threads."""
        with opened(tmp_path) as folder:
            write(folder, 1, 2, 3, 4)
            write(folder, 5, 6)
            write(folder, 7)
            folder.flush()
        for most in (1, 2 * LAYOUT.num_bytes, 2**20):
            with pytest.MonkeyPatch.context() as patch, opened(tmp_path) as folder:
                patch.setattr(prefix_folder, "_READ_BYTES", most)
                patch.setattr(block_file, "_MOST_VIEWS", 3)
                assert folder.leading([1, 2, 3, 4, 5, 6, 7, 8]) == 7
                assert read(folder, 1, 2, 3, 4, 5, 6, 7) == [1, 2, 3, 4, 5, 6, 7]
                assert read(folder, 3, 4, 5) == [3, 4, 5]
                assert read(folder, 6, 2, 7) == [6, 2, 7]
                assert read(folder, 1, 9, 3) == [1]

    def test_any_flipped_bit(self, tmp_path):
        """The file is refused, or its blocks up to the one that has it are right."""
        with opened(tmp_path) as folder:
            write(folder, 1, 2, 3)
        [path] = files_in(tmp_path)
        right = path.read_bytes()
        for place in range(0, len(right), 5):
            path.write_bytes(right)
            flip(path, place, 1 << place % 8)
            with opened(tmp_path) as folder:
                assert folder.leading([1, 2, 3]) in (0, 3)
                found = read(folder, 1, 2, 3)
                assert found == [1.0, 2.0, 3.0][: len(found)] and len(found) < 3
                assert folder.leading([1, 2, 3]) == 0

    @pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
    def test_short_files(self, tmp_path, size):
        with opened(tmp_path) as folder:
            write(folder, 1, 2)
        [path] = files_in(tmp_path)
        path.write_bytes(path.read_bytes()[:size])
        with opened(tmp_path) as folder:
            assert held(folder, 1, 2) == [] and read(folder, 1) == []

    def test_other_format_or_model(self, tmp_path, monkeypatch):
        """A right file of another version, fingerprint or layout."""
        path = tmp_path / NAME / group_name([1])
        path.parent.mkdir()
        shaped = {**blocks(1), "latents": torch.ones(1, 4, 2).bfloat16()}
        other = BlockLayout({**LAYOUT.shapes, "latents": (4, 2)}, LAYOUT.dtype)
        makers = [
            lambda: write_group(path, 1, tensors=shaped, layout=other),
            lambda: write_group(path, 1, fingerprint=NAME[::-1]),
            lambda: write_group(path, 2),
        ]
        for make in makers:
            make()
            with opened(tmp_path) as folder:
                assert held(folder, 1) == []
        with monkeypatch.context() as patch:
            patch.setattr(block_file, "_FORMAT", "absorbed_mla prefix blocks 4")
            write_group(path, 1)
        with opened(tmp_path) as folder:
            assert held(folder, 1) == []

    def test_blocks_of_other_tokens(self, tmp_path):
        """Whose file and header say that they are these."""
        path = tmp_path / NAME / group_name([1])
        path.parent.mkdir()
        write_group(path, 2)
        path.write_bytes(path.read_bytes().replace(b"%016x" % 2, b"%016x" % 1))
        with opened(tmp_path) as folder:
            assert held(folder, 1) == [1] and read(folder, 1) == []

    def test_newest_file_of_a_block(self, tmp_path):
        """A damaged file of the same block may still be there."""
        with opened(tmp_path) as folder:
            write(folder, 1, 2)
            folder.flush()
            [damaged] = files_in(tmp_path)
            write(folder, 1)
        flip(damaged, -2 * LAYOUT.num_bytes)  # in the first block
        os.utime(damaged, ns=(1, 1))
        with opened(tmp_path) as folder:
            assert held(folder, 1, 2) == [1, 2]
            assert read(folder, 1) == [1.0]

    def test_bound(self, tmp_path):
        write_group(one := tmp_path / "one", 0)
        size = one.stat().st_size
        with opened(tmp_path, limit=3 * size) as folder:
            for number in (1, 2, 3):
                write(folder, number)
            folder.flush()
            folder.touch([1])
            # Another process, of other weights.
            with opened(tmp_path, NAME[::-1], 3 * size) as other:
                write(other, 4)
            assert held(folder, 1, 2, 3) == [1, 3] and held(other, 4) == [4]
            assert read(folder, 1) == [1.0]
            assert read(folder, 2, 3) == []

    def test_chain_is_deleted_from_its_end(self, tmp_path):
        with opened(tmp_path) as folder:
            for number in (1, 3, 5, 7):
                write(folder, number, number + 1)
            folder.flush()
            folder.touch(range(1, 9))
            size = files_in(tmp_path)[0].stat().st_size
            with opened(tmp_path, limit=2 * size):
                pass
            assert folder.leading(range(1, 9)) == 4 and held(folder, *range(1, 9)) == [1, 2, 3, 4]

    def test_files_are_small_beside_the_bound(self, tmp_path):
        """Or the only one would be deleted for another block."""
        for limit, most in ((10**12, 2**25), (LAYOUT.num_bytes * 12, LAYOUT.num_bytes * 3)):
            with opened(tmp_path, limit=limit) as folder:
                assert folder.blocks_per_file == most // LAYOUT.num_bytes

    def test_processes_share_it(self, tmp_path):
        """Each writes the same files again and again, and never sees a part of one."""
        with opened(tmp_path) as one, opened(tmp_path) as other:
            write(one, 1, 2)
            one.flush()
            for _ in range(100):
                for folder in (one, other):
                    write(folder, 1, 2)
                for folder in (one, other):
                    assert folder.leading([1, 2]) == 2
                    assert read(folder, 1, 2) == [1.0, 2.0]
        assert len(list((tmp_path / NAME).iterdir())) == 1

    def test_leftovers_are_removed(self, tmp_path):
        """And not what other programs have there."""
        (tmp_path / NAME).mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        for name, age in ((".old.1.0", 7200), (".new.1.0", 0)):
            path = tmp_path / NAME / name
            path.touch()
            os.utime(path, (path.stat().st_mtime - age,) * 2)
        with opened(tmp_path, limit=100):
            pass
        assert [path.name for path in (tmp_path / NAME).iterdir()] == [".new.1.0"]
        assert (tmp_path / "notes.txt").exists()

    def test_what_cannot_be_written(self, tmp_path, caplog):
        (tmp_path / NAME).write_text("a file in the folder's place")
        with caplog.at_level(logging.WARNING), opened(tmp_path, limit=100) as folder:
            write(folder, 1)
            write(folder, 2)
        assert len(caplog.records) == 1 and held(folder, 1) == []

    def test_same_bits(self, tmp_path):
        odd = {n: torch.randn(1, *s).bfloat16() for n, s in LAYOUT.shapes.items()}
        odd["latents"][0, 0, 0] = float("nan")
        again = {name: torch.zeros_like(tensor) for name, tensor in odd.items()}
        with opened(tmp_path) as folder:
            folder.write([1], odd)
            folder.flush()
            # In several parts, as memory of several layers is.
            layers = [bytes_of(layer) for layer in again["latents"][0]]
            assert folder.read([1], [[layers, [bytes_of(again["index_keys"])]]]) == 1
        for name, tensor in odd.items():
            assert torch.equal(tensor.view(torch.int16), again[name].view(torch.int16))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prefix_cache_bytes": 99}, "prefix_cache_bytes must be at least a block's"),
        ({"prefix_cache_dir": __file__}, "prefix_cache_dir must be a folder that can be"),
    ],
)
def test_refused_options(model, folder, changes, error):
    with pytest.raises(ValueError, match=error):
        engine_with(folder, model, **changes)
