"""New weights for a loaded ``LLM``: from memory, in the middle of requests, refused, asleep."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.export import LiveWeights, WeightSender
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights import transfer
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.load import load_model
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support import needs
from tests.support.forked_python import forks_python
from tests.support.llm import serving, tiny_folder

pytestmark = [needs.no_gpu, pytest.mark.usefixtures("forked_python")]

OPTIONS = {"tokenizer": "bytes", "max_num_seqs": 4, "parity": True}
PROMPTS = [list(range(7, 80)), [3, 200, 5]]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)


class Tensors:
    """Weights as ``LiveWeights`` gives them, of a dict."""

    device = torch.device("cpu")

    def __init__(self, tensors: dict[str, torch.Tensor], most: int | None = None) -> None:
        self.tensors, self._most = tensors, most
        self.shapes = [(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]

    def __iter__(self):
        yield from [*self.tensors.items()][: self._most]


def tensors_of(folder) -> dict[str, torch.Tensor]:
    found = open_model(folder).hugging_face_tensors()
    with ReadSession() as session:
        return {name: lazy.load(session).clone() for name, lazy in found.items()}


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of the same model; copies of one are equal."""

    def noise(x: torch.Tensor) -> torch.Tensor:
        seed = torch.Generator().manual_seed(x.numel())
        return 0.2 * x.std(correction=0) * torch.randn(x.shape, generator=seed)

    return {name: x + noise(x) for name, x in tensors.items()}


def outputs_of(llm, prompts=PROMPTS, params=PARAMS) -> list[tuple]:
    """Tokens and log-probabilities."""
    outputs = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    return [(one.token_ids, one.token_logprobs) for one in outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model, with an MTP layer."""
    root = tmp_path_factory.mktemp("tiny")
    old = tiny_folder(root / "old", num_nextn_predict_layers=1)
    config = open_model(old).config
    return old, write_hugging_face(root / "new", config, changed(tensors_of(old)))


@pytest.fixture(scope="module")
def new(folders) -> dict[str, torch.Tensor]:
    return tensors_of(folders[1])


@pytest.fixture(scope="module")
def loaded(folders):
    """``LLM`` of the first checkpoint, and what it generates before it has other weights."""
    with forks_python(), LLM(folders[0], **OPTIONS) as llm:
        yield llm, outputs_of(llm)


@pytest.fixture(scope="module")
def expected(folders, loaded) -> tuple[list[tuple], list[tuple]]:
    """What models that were loaded from each checkpoint generate."""
    with forks_python(), LLM(folders[1], **OPTIONS) as llm:
        found = outputs_of(llm)
    assert loaded[1] != found
    return loaded[1], found


@pytest.fixture
def old(loaded, folders):
    """With the weights of its checkpoint."""
    llm, _ = loaded
    llm.wake()
    llm.update_weights(Tensors(tensors_of(folders[0])))
    return llm


def test_equal_to_a_fresh_model(old, new, expected):
    assert outputs_of(old) == expected[0]
    old.update_weights(Tensors(new))
    assert outputs_of(old) == expected[1]
    old.require_no_leak()


@pytest.mark.parametrize("keep_cache", [False, True])
def test_in_the_middle_of_requests(old, new, expected, keep_cache):
    """Tokens of the former weights stay; latents of them only with ``keep_cache``."""
    params = PARAMS.replace(max_tokens=12)
    names = [old.add_request(one, params) for one in PROMPTS]
    done: dict[str, list[int]] = {}
    while min((len(one) for one in done.values()), default=0) < 4 or len(done) < 2:
        done |= {one.request_id: [*one.outputs[0].token_ids] for one in old.step()}
    assert [done[name] for name in names] == [tokens[:4] for tokens, _ in expected[0]]
    old.add_request([9, 8, 7], params, "waits")
    old.update_weights(Tensors(new), keep_cache=keep_cache)
    ended = {}
    while old.has_unfinished_requests():
        ended |= {one.request_id: one for one in old.step() if one.finished}
    found = [
        (ended[name].outputs[0].token_ids[4:], ended[name].outputs[0].token_logprobs[4:])
        for name in names
    ]
    longer = [[*one, *done[name]] for one, name in zip(PROMPTS, names)]
    again = outputs_of(old, [*longer, [9, 8, 7]], [params.replace(max_tokens=8)] * 2 + [params])
    assert ended["waits"].outputs[0].token_ids == again[2][0]
    assert (found == again[:2]) == (not keep_cache)
    [cached] = old.generate([PROMPTS[0]], params, use_tqdm=False)
    assert cached.num_cached_tokens == 64
    old.require_no_leak()


def test_prefix_cache(old):
    """It is emptied by choice, also under running requests."""

    def cached() -> int:
        return old.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0].num_cached_tokens

    before = old.statistics().evicted
    assert (cached(), cached()) == (0, 64)
    assert old.reset_prefix_cache() and cached() == 0
    name = old.add_request(PROMPTS[0], PARAMS)
    old.step()
    assert not old.reset_prefix_cache() and old.reset_prefix_cache(True)
    while old.has_unfinished_requests():
        [output] = old.step() or [None]
    assert output.request_id == name
    assert old.statistics().evicted == before + 1


def without(tensors, name):
    return {key: x for key, x in tensors.items() if key != name}


NAME = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: without(x, NAME), f"{NAME} is missing"),
        (lambda x: x | {"model.layers.9.a.weight": x[NAME]}, "model.layers.9.a.weight"),
        (lambda x: x | {NAME: x[NAME][1:]}, NAME),
        (lambda x: x | {NAME: x[NAME].to(torch.float8_e4m3fn)}, "must have a dtype of .*float8"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_refused(old, new, expected, change, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        old.update_weights(Tensors(change(new)))
    assert outputs_of(old) == expected[0]


def test_other_refusals(old, folders):
    with pytest.raises(ValueError, match="weights must be LiveWeights or an address, got dict"):
        old.update_weights({})
    with pytest.raises(ValueError, match="address must be tcp://HOST:PORT, got 'trainer'"):
        old.update_weights("trainer")
    with pytest.raises(ValueError, match="level must be 0, 1 or 2, got 3"):
        old.sleep(3)


@pytest.mark.parametrize("changes", [False, True])
def test_a_transfer_that_fails(old, new, expected, monkeypatch, changes):
    """Nothing is generated with a part of the weights, until another update."""
    old.add_request(PROMPTS[1], PARAMS, "runs")
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 4096 if changes else 2**20)
    with pytest.raises(RuntimeError, match=r"weight, .*was announced, and no tensor"):
        old.update_weights(Tensors(new, most=len(new) - 1))
    if changes:
        with pytest.raises(RuntimeError, match=r"has failed.*; call update_weights"):
            old.step()
        old.update_weights(Tensors(new))
    while old.has_unfinished_requests():
        [output] = old.step() or [None]
    assert output.outputs[0].token_ids == expected[changes][1][0]


@pytest.mark.parametrize("level", [1, 2])
def test_asleep(old, new, expected, level):
    old.sleep(level)
    assert old.is_sleeping
    if level == 2:
        with pytest.raises(RuntimeError, match=r"discarded the weights; call update_weights"):
            old.wake()
    old.update_weights(Tensors(new))
    old.wake()
    assert outputs_of(old) == expected[1]


def test_drafts_and_ranks(folders, new, expected):
    """Two processes that draft with the MTP layer, whose tokens are those without drafts."""
    options = {**OPTIONS, "parity": False, "num_speculative_tokens": 1, "tensor_parallel_size": 2}
    with LLM(folders[0], **options) as llm:
        llm.update_weights(Tensors(new))
        found = outputs_of(llm, params=PARAMS.replace(logprobs=None))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[1]]


def test_memory(tmp_path):
    """``sleep(2)`` gives the memory of the weights back, and ``update_weights`` takes it again."""
    config = tiny_config(vocab_size=500_000, num_hidden_layers=1, torch_dtype="float32")
    tensors = random_tensors(config, torch.float32)
    folder = write_hugging_face(tmp_path / "model", config, tensors)
    size = sum(x.nbytes for x in tensors.values())
    with LLM(folder, max_num_seqs=2, cache_tokens=256) as llm:
        [process] = map(psutil.Process, llm._runner.process_ids())
        before = process.memory_info().rss
        llm.sleep(2)
        asleep = process.memory_info().rss
        llm.update_weights(Tensors(tensors))
        llm.wake()
        after = process.memory_info().rss
    assert before - asleep > 0.95 * size
    assert after < before + 0.05 * size


@pytest.fixture(scope="module")
def model(folders):
    """Trained, with the new weights."""
    options = LLMOptions(tensor_parallel_size=1)
    return load_model(open_model(folders[1]), options, torch.device("cpu"))


class TestSender:
    """From another program, as far as an ``LLM`` can tell."""

    @pytest.mark.parametrize("backend", ["process_group", "shared_memory"])
    def test_live_weights(self, old, model, expected, backend):
        weights = LiveWeights(model)
        sender = WeightSender("tcp://127.0.0.1:0", 1, backend=backend, bucket_bytes=4096)
        with ThreadPoolExecutor(1) as threads:
            for _ in range(2):
                answer = threads.submit(old.update_weights, sender.address)
                sender.send(weights)
                answer.result()
        assert outputs_of(old) == expected[1]

    def test_another_sender_at_the_same_address(self, old, model, expected):
        """As of a trainer that was started again."""
        address = "tcp://127.0.0.1:0"
        with ThreadPoolExecutor(1) as threads:
            for _ in range(2):
                sender = WeightSender(address, 1, bucket_bytes=1 << 20)
                answer = threads.submit(old.update_weights, sender.address)
                sender.send(LiveWeights(model))
                answer.result()
                address = sender.address
                del sender
        assert outputs_of(old) == expected[1]


class TestServer:
    """Through HTTP."""

    @pytest.fixture
    def client(self, old):
        pytest.importorskip("uvicorn")
        openai = pytest.importorskip("openai")
        with serving(llm=old, app_options={"enable_rl_endpoints": True}) as served:
            yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)

    def complete(self, client, prompts=PROMPTS, tokens=6, **ask):
        more = {"ignore_eos": True, "return_token_ids": True}
        ask |= {"model": "tiny", "temperature": 0, "logprobs": 0, "extra_body": more}
        return client.completions.create(prompt=prompts, max_tokens=tokens, **ask)

    def rollouts(self, client) -> list[tuple]:
        found = self.complete(client).choices
        return [(one.token_ids, one.logprobs.token_logprobs) for one in found]

    def update(self, client, weights, **more):
        """What the server answers to an update from a sender."""
        sender = WeightSender("tcp://127.0.0.1:0", 1, bucket_bytes=4096)
        body = {"address": sender.address, **more}
        url = str(client.base_url).replace("/v1/", "/update_weights")
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(client.post, url, body=body, cast_to=object)
            with contextlib.suppress(ValueError):
                sender.send(weights)
            return answer.result()

    def test_rollouts(self, client, model, expected):
        assert self.rollouts(client) == expected[0]
        assert self.update(client, LiveWeights(model)) == {"message": "Weights updated"}
        assert self.rollouts(client) == expected[1]

    def test_in_the_middle_of_a_stream(self, client, model, old):
        """It goes on, as a new model does after the tokens that there are."""
        count, prompt = 12, PROMPTS[1]
        stream = self.complete(client, prompt, count, stream=True)
        pieces = [next(stream)]
        self.update(client, LiveWeights(model))
        pieces += stream
        tokens = [token for piece in pieces for token in piece.choices[0].token_ids]
        log_probs = [x for piece in pieces for x in piece.choices[0].logprobs.token_logprobs]
        assert len(tokens) == len(log_probs) == count
        params = [PARAMS.replace(max_tokens=count - k) for k in range(1, count)]
        again = outputs_of(old, [[*prompt, *tokens[:k]] for k in range(1, count)], params)
        assert any(one == (tokens[k:], log_probs[k:]) for k, one in enumerate(again, 1))

    def test_refused(self, client, new, expected):
        openai = pytest.importorskip("openai")
        with pytest.raises(openai.BadRequestError, match=f"{NAME} is missing"):
            self.update(client, Tensors(without(new, NAME)))
        url = str(client.base_url).replace("/v1/", "/update_weights")
        body = {"address": "tcp://127.0.0.1:9", "timeout": 0.2}
        with pytest.raises(openai.BadRequestError, match="nobody sends weights at"):
            client.post(url, body=body, cast_to=object)
        assert self.rollouts(client) == expected[0]
