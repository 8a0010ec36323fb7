"""Data of scripts/train.py: which files it reads, and in which order it trains on them.

If these fail, a resumed run trains on other text than the interrupted run would have.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest

from training.data import (
    ByteTokenizer,
    Windows,
    build_tokenizer,
    find_files,
    read_corpus,
    split_corpus,
)


def written(folder: Path, **files: bytes) -> str:
    """A folder with these files; ``__`` in a name stands for a slash."""
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def windows(tokens: int, seed: int = 1, **options) -> Windows:
    """Of 10 consecutive numbers."""
    return Windows(np.arange(tokens, dtype=np.int32), 10, seed, "training", **options)


def test_corpus_ends_every_document(tmp_path):
    corpus = read_corpus(written(tmp_path, a=b"ab", b=b"c"), ByteTokenizer())
    assert corpus.num_documents == 2
    assert sorted(corpus.tokens.tolist()) == [97, 98, 99, 256, 256]
    assert corpus.tokens[-1] == 256
    other = read_corpus(written(tmp_path, b=b"d"), ByteTokenizer())
    assert other.fingerprint != corpus.fingerprint


def test_corpus_leaves_out_binaries_hidden_and_empty_files(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    folder = written(tmp_path, image=b"\x89PNG\0\0", empty=b"", sub__text=b"x")
    assert read_corpus(folder, ByteTokenizer()).tokens.tolist() == [ord("x"), 256]


def test_default_data_is_the_standard_library():
    files = find_files(None)
    assert {"argparse.py", "random.py"} <= {file.name for file in files}
    assert not any("site-packages" in file.parts for file in files)


def test_order_of_files_does_not_depend_on_the_folder(tmp_path):
    folders = [written(tmp_path / name, **{f"f{i}": b"x" for i in range(9)}) for name in "ab"]
    one, two = ([file.name for file in find_files(folder)] for folder in folders)
    assert one == two != sorted(one)


def test_missing_and_empty_data_are_errors(tmp_path):
    with pytest.raises(ValueError, match="--data: there is no file or folder"):
        find_files(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="--data: there are no files"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match="--data: there is no text"):
        read_corpus(written(tmp_path, empty=b""), ByteTokenizer())
    with pytest.raises(ValueError, match="--tokenizer"):
        build_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"10 training tokens .* --seq-length 10"):
        windows(10)


def test_split_keeps_every_token():
    train, valid = split_corpus(np.arange(1000), 95)
    assert len(train) == 950
    assert np.array_equal(np.concatenate([train, valid]), np.arange(1000))


def test_every_epoch_has_every_window_once_in_another_order():
    found = windows(101, seed=3)
    assert found.count == 10
    epochs = [[int(found[e * 10 + i][0]) for i in range(10)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 100, 10))
    assert epochs[0] != epochs[1]


def test_a_window_overlaps_the_next_by_its_last_label():
    for window in (windows(21)[i] for i in range(2)):
        assert np.array_equal(np.diff(window), np.ones(10))


def test_windows_do_not_depend_on_what_was_read_before():
    read_all = windows(1001)
    everything = [read_all[i] for i in range(350)]
    assert np.array_equal(windows(1001)[349], everything[349])
    assert not np.array_equal(windows(1001, seed=2)[349], everything[349])
    # Validation begins again with its first window.
    again = windows(101, period=3)
    assert all(np.array_equal(again[index], again[index % 3]) for index in range(9))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_global_batch_is_the_same_at_every_data_parallel_size(dp_size, micro_batch_size):
    """As Megatron's sampler asks for it, also in a resumed run."""
    # Imported after what makes it importable.
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    found, seen = windows(1001), []
    for rank in range(dp_size):
        sampler = MegatronPretrainingSampler(len(found), 40, micro_batch_size, rank, dp_size)
        for microbatch in itertools.islice(sampler, 8 // (micro_batch_size * dp_size)):
            seen += [found[index].tolist() for index in microbatch]
    assert sorted(seen) == sorted(found[index].tolist() for index in range(40, 48))
