"""What the host does in a step: once for all layers, and little for each request.

A GPU waits for it: each of these counts was higher, or grew with the layers, and steps that read
prompts took as long as their host.
"""

import contextlib
import hashlib
import struct
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from absorbed_mla.caching import full_cuda_graph
from absorbed_mla.inference import attention
from absorbed_mla.inference.caches.dynamic import ForwardRows
from absorbed_mla.inference.row_groups import ChunkedContext
from absorbed_mla.rope import RotaryTable
from absorbed_mla.serving.sampling.device_sampler import Randoms, derive_seed, uniform
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.tokenizers.detokenizer import hugging_face_stream
from absorbed_mla.serving.tokenizers.token_ids import IntegerTokenizer
from tests.support.engine import engine_of, generating_model, prompt, step_to_the_end
from tests.support.tokenizers import byte_level, with_byte_fallback

# Each waits for the device, unless its tensor is on the host.
READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__")
LAYERS = (2, 4)
# Of a layer on a CPU, views included: 170 with PyTorch 2.13, and 184 before they shared tables.
MOST_OPERATIONS = 176
# Tables on the host, tokens that have landed; of our attention's the two lists of lengths.
MOST_READS = 8
CHUNKS = {"chunked_prefill": True, "step_tokens": 128, "max_sequence_length": 320}


class Counts(TorchDispatchMode):
    """Operations of PyTorch, and calls of functions by name."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.operations, self.calls, self._patch = 0, Counter(), monkeypatch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))

    def count(self, owner, name: str) -> None:
        """Count calls of a function or method from now on."""
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            self.calls[name] += 1
            return function(*args, **kwargs)

        self._patch.setattr(owner, name, counted)


@contextlib.contextmanager
def counting(*functions: tuple[object, str]) -> Iterator[Counts]:
    """Counts of the block, of these functions of owners and of any that it adds."""
    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(patch)
        for owner, name in functions:
            counts.count(owner, name)
        yield counts


def steps(layers: int, lengths, watch, **options) -> Counts:
    """Read prompts with a model of some layers, the last of them in a counted step."""
    engine = engine_of(generating_model(num_layers=layers), blocks=40, **options)
    with engine, counting() as counts:
        for number, length in enumerate(lengths):
            engine.add_request(prompt(length, number), SamplingParams(max_tokens=4, temperature=0))
        while len(engine.host.waiting_request_ids) > 1:
            engine.step()
        watch(counts)
        with counts:
            engine.step()
    engine.close()
    return counts


def of_reads(counts: Counts) -> None:
    for name in READS:
        counts.count(torch.Tensor, name)


def test_reads_do_not_grow_with_the_layers():
    few, many = (steps(layers, (100,), of_reads) for layers in LAYERS)
    assert few.calls == many.calls
    assert few.calls.total() <= MOST_READS, few.calls


def test_operations_of_a_layer():
    few, many = (steps(layers, (100,), lambda counts: None) for layers in LAYERS)
    each = (many.operations - few.operations) / (LAYERS[1] - LAYERS[0])
    assert each <= MOST_OPERATIONS


def of_tables(counts: Counts) -> None:
    counts.count(attention, "is_cheaper_expanded")
    counts.count(attention, "rows_of")
    counts.count(ChunkedContext, "_spans")
    counts.count(RotaryTable, "rows")
    counts.count(ForwardRows, "_made")


def test_tables_are_made_once():
    """A step with decoding requests, a chunk after cached keys, and a prompt that begins."""
    few, many = (steps(layers, (20, 30, 150, 90), of_tables, **CHUNKS) for layers in LAYERS)
    assert few.calls == many.calls
    assert few.calls["rows"] == few.calls["_made"] == 1
    # Of the row with several new tokens.
    assert few.calls["is_cheaper_expanded"] == 1
    assert few.calls["rows_of"] and few.calls["_spans"]


def test_tables_of_graphs():
    """Graphs of layers each make their own; in one of a whole step the first layer does."""
    engine = engine_of(generating_model(num_layers=2), num_cuda_graphs=4)
    with engine, counting() as counts:
        engine.add_request(prompt(30), SamplingParams(max_tokens=9, temperature=0))
        engine.step()
        counts.count(ForwardRows, "_made")
        for one_graph, expected in ((False, 2), (True, 1), (True, 1), (False, 2)):
            counts.calls.clear()
            with full_cuda_graph() if one_graph else contextlib.nullcontext():
                engine.step()
            assert counts.calls["_made"] == expected
        found = step_to_the_end(engine)
    plain = engine_of(generating_model(num_layers=2))
    assert found == plain.generate([prompt(30)], SamplingParams(max_tokens=9, temperature=0))
    engine.close()


def test_no_texts_of_ended_requests():
    engine = engine_of(generating_model())
    with counting((IntegerTokenizer, "detokenize")) as counts:
        [result] = engine.generate([prompt(30)], SamplingParams(max_tokens=3))
    assert len(result.tokens) == 3 and not counts.calls


def test_texts_are_decoded_about_once_a_token():
    tokenizer = with_byte_fallback()
    tokens = tokenizer("ab a b aa bb " * 20, add_special_tokens=False)["input_ids"]
    stream = hugging_face_stream(tokenizer, [])
    with counting((tokenizer, "decode")) as counts:
        text = "".join(stream.push([token]) for token in tokens) + stream.finish()
    assert counts.calls["decode"] < 1.2 * len(tokens)
    assert text == tokenizer.decode(tokens)
    # Bytes need no tokenizer.
    tokenizer = byte_level()
    with counting((tokenizer, "decode")) as counts:
        hugging_face_stream(tokenizer, []).push(list(range(200)))
    assert not counts.calls["decode"]


def test_random_numbers_are_those_of_their_seeds():
    """They may never change: requests with a seed would draw other tokens."""

    def digest(seed: int, position: int) -> bytes:
        return hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()

    seeds, positions = [3, -5, 2**63 - 1, 3], [0, 9, 2**40, 1]
    digests = list(map(digest, seeds, positions))
    wanted = [(int.from_bytes(one, "little") >> 11) / 2**53 for one in digests]
    assert Randoms(seeds).at(positions) == wanted
    assert list(map(uniform, seeds, positions)) == wanted
    signed = [int.from_bytes(one, "little", signed=True) for one in digests]
    assert list(map(derive_seed, seeds, positions)) == signed
