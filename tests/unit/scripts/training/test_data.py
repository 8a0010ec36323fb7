"""Data of scripts/train.py: which files it reads, and in which order it trains on them.

If these fail, a resumed run trains on other text than the interrupted run would have.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from training.batch import make_batch
from training.data import Windows, find_files, read_corpus, split_corpus
from training.tokenizers import ByteTokenizer, build_tokenizer


def test_corpus_ends_every_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"c")
    corpus = read_corpus(str(tmp_path), ByteTokenizer())
    assert corpus.num_documents == 2
    assert sorted(corpus.tokens.tolist()) == [97, 98, 99, 256, 256]
    assert corpus.tokens[-1] == 256


def test_corpus_leaves_out_binaries_hidden_and_empty_files(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "text.md").write_bytes(b"x")
    assert read_corpus(str(tmp_path), ByteTokenizer()).tokens.tolist() == [ord("x"), 256]


def test_fingerprint_sees_one_changed_byte(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc")
    before = read_corpus(str(file), ByteTokenizer()).fingerprint
    file.write_bytes(b"abd")
    assert read_corpus(str(file), ByteTokenizer()).fingerprint != before


def test_default_data_is_the_standard_library():
    names = {file.name for file in find_files(None)}
    assert {"argparse.py", "random.py"} <= names
    assert not any("site-packages" in file.parts for file in find_files(None))


def test_order_of_files_does_not_depend_on_the_folder(tmp_path):
    orders = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(9):
            (tmp_path / name / f"{number}.txt").write_text("x")
        orders.append([file.name for file in find_files(str(tmp_path / name))])
    assert orders[0] == orders[1]


def test_missing_and_empty_data_are_errors(tmp_path):
    with pytest.raises(ValueError, match="--data: there is no file or folder"):
        find_files(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="--data: there are no files"):
        find_files(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="--data: there is no text"):
        read_corpus(str(tmp_path), ByteTokenizer())


def test_missing_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="--tokenizer"):
        build_tokenizer(str(tmp_path / "absent"))


def test_split_keeps_every_token():
    train, valid = split_corpus(np.arange(1000), 95)
    assert len(train) == 950
    assert np.array_equal(np.concatenate([train, valid]), np.arange(1000))


def test_every_epoch_has_every_window_once_in_another_order():
    windows = Windows(np.arange(101, dtype=np.int32), 10, seed=3, name="training")
    assert windows.count == 10
    epochs = [[int(windows[e * 10 + i][0]) for i in range(10)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 100, 10))
    assert epochs[0] != epochs[1]


def test_a_window_overlaps_the_next_by_its_last_label():
    windows = Windows(np.arange(21, dtype=np.int32), 10, seed=0, name="training")
    for i in range(2):
        assert np.array_equal(np.diff(windows[i]), np.ones(10))
        assert len(windows[i]) == 11


def test_windows_do_not_depend_on_what_was_read_before():
    tokens = np.arange(1001, dtype=np.int32)
    read_all = Windows(tokens, 10, seed=1, name="training")
    everything = [read_all[i] for i in range(350)]
    resumed = Windows(tokens, 10, seed=1, name="training")
    assert np.array_equal(resumed[349], everything[349])
    other_seed = Windows(tokens, 10, seed=2, name="training")
    assert not np.array_equal(other_seed[349], everything[349])


def test_too_little_text_is_an_error():
    with pytest.raises(ValueError, match=r"10 training tokens .* --seq-length 10"):
        Windows(np.arange(10, dtype=np.int32), 10, seed=0, name="training")


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_global_batch_is_the_same_at_every_data_parallel_size(dp_size, micro_batch_size):
    """As Megatron's sampler asks for it, also in a resumed run."""
    # Imported after what makes it importable.
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    windows = Windows(np.arange(1001, dtype=np.int32), 10, seed=1, name="training")
    seen = []
    for rank in range(dp_size):
        sampler = MegatronPretrainingSampler(len(windows), 40, micro_batch_size, rank, dp_size)
        for microbatch in itertools.islice(sampler, 8 // (micro_batch_size * dp_size)):
            seen += [windows[index].tolist() for index in microbatch]
    assert sorted(seen) == sorted(windows[index].tolist() for index in range(40, 48))


def test_validation_begins_again_with_its_first_window():
    tokens = np.arange(101, dtype=np.int32)
    windows = Windows(tokens, 10, seed=0, name="validation", period=3)
    assert all(np.array_equal(windows[index], windows[index % 3]) for index in range(9))


def test_labels_are_the_next_tokens():
    batch = make_batch(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.device("cpu"))
    assert batch.tokens.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch.labels.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert batch.loss_mask.sum() == 6
    assert batch.packed_seq_params is None


def test_packed_documents_are_sequences_of_their_own():
    row = torch.tensor([[5, 6, 9, 7, 9, 9, 8]])
    batch = make_batch(row, torch.device("cpu"), packed_eod=9)
    assert batch.packed_seq_params.cu_seqlens_q.tolist() == [0, 3, 5, 6]
    assert batch.packed_seq_params.max_seqlen_q == 3
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    # What follows an end token is another document's first token: nothing to learn from.
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0]]
