"""What each backend refuses, and why, from the request alone; no GPU is needed to ask.

An explicit choice raises with the reason; "auto" takes another backend.
"""

import contextlib

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from absorbed_mla import AbsorbedMLAOptions, MLADims
from absorbed_mla.context_parallel.strategy import LocalKeys
from absorbed_mla.core_attention import module as latent_attention
from absorbed_mla.core_attention import selection
from absorbed_mla.core_attention.backends import flash_attention_4, triton
from absorbed_mla.core_attention.backends import transformer_engine as te
from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.cost import Work
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.core_attention.selection import Candidates, candidates, choose, fastest
from absorbed_mla.options import CORE_ATTENTION_BACKENDS, FORMS
from absorbed_mla.registry import ATTENTION_BACKENDS
from absorbed_mla.sequences import SequenceLayout
from tests.support import fake_packages
from tests.support.backends import V3_DIMS, attention_request, determinism, why_not
from tests.support.cases import INTERPRETED, TINY, config_for
from tests.support.refusal import refusal

CPU = torch.device("cpu")
DIMS = MLADims.from_config(config_for(TINY), 1)
FUSED = ("cudnn", "transformer_engine", "flash_attention_4", "hopper_expanded")
FORM = dict.fromkeys(FUSED, "expanded")
FORM |= dict.fromkeys(("hopper", "triton"), "absorbed")
# The least compute capability, and whether newer GPUs will do.
HOPPER_ONLY = ("flash_attention_4", "hopper", "hopper_expanded")
CAPABILITY = dict.fromkeys(HOPPER_ONLY, ((9, 0), False))
CAPABILITY |= dict.fromkeys(("cudnn", "transformer_engine"), ((9, 0), True))
CAPABILITY["triton"] = (8, 0), True
ANY_KERNEL = [
    ({"device": CPU}, "needs a GPU"),
    ({"device": torch.device("meta")}, "needs a GPU"),
    ({"dtype": torch.float32}, "fp16 and bf16"),
    ({"dtype": torch.float64}, "fp16 and bf16"),
    ({"masked": True}, "attention_mask"),
    ({"dropout": True}, "attention_dropout=0"),
]
OTHER_FORM = {
    "expanded": ({"form": "absorbed"}, "form='expanded'"),
    "absorbed": ({"form": "expanded", "key_width": 192, "value_width": 128}, "form='absorbed'"),
}
EXPANDED_WIDTHS = [
    ({"key_width": 260}, "(260, 128) are not multiples of 8 up to 256"),
    ({"value_width": 264}, "(192, 264) are not multiples of 8 up to 256"),
]
LATENT_WIDTHS = [
    ({"key_width": 500, "value_width": 436}, "widths 436"),
    ({"key_width": 520}, "8 (rope)"),
]
WIDTHS = {name: EXPANDED_WIDTHS for name, form in FORM.items() if form == "expanded"}
WIDTHS |= {"hopper": LATENT_WIDTHS, "triton": LATENT_WIDTHS}
WIDTHS["hopper_expanded"] = [
    *EXPANDED_WIDTHS,
    ({"key_width": 256}, "widths 256 (keys) and 128 (values) are not among"),
    ({"value_width": 256}, "widths 192 (keys) and 256 (values) are not among"),
]
REFUSED = [
    (name, changes, reason)
    for name, form in FORM.items()
    for changes, reason in [*ANY_KERNEL, OTHER_FORM[form], *WIDTHS[name]]
]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    """As on a Hopper GPU with every package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.6.0")
    # It asks for the shared memory of a real device.
    monkeypatch.setattr(triton, "_why_not_shared_memory", lambda *_: None)
    monkeypatch.setattr(flash_attention_4, "why_not_installed", lambda *widths: None)
    te.why_not_installed.cache_clear()
    fake_packages.transformer_engine.install(monkeypatch)
    with determinism(demanded=False):
        yield
    te.why_not_installed.cache_clear()


def test_what_can_run():
    for form, expected in {
        "expanded": {*FUSED, "reference"},
        "absorbed": {"hopper", "triton", "reference"},
    }.items():
        runnable, _ = ATTENTION_BACKENDS.examine("auto", attention_request(form))
        assert {backend.name for backend in runnable} == expected
    assert [
        x.name for x in ATTENTION_BACKENDS.examine("reference", attention_request("expanded"))[0]
    ] == ["reference"]
    with refusal("core_attention_backend", ", ".join(CORE_ATTENTION_BACKENDS), "'flash'"):
        ATTENTION_BACKENDS.examine("flash", attention_request("expanded"))


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED, ids=str)
def test_refused(name, changes, reason):
    """An explicit choice raises; "auto" falls back."""
    request = attention_request(**{"form": FORM[name], **changes})
    assert reason in why_not(name, request)
    with refusal(f"core_attention_backend={name!r}", "cannot run here", reason):
        choose({FORM[name]: request}, name, DIMS, Work(1, 1, 1, training=True))
    runnable, _ = ATTENTION_BACKENDS.examine("auto", request)
    names = [entry.name for entry in runnable]
    assert "reference" in names and name not in names


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("name", CORE_ATTENTION_BACKENDS[1:])
def test_options_know_which_form_it_computes(name, form):
    """The options refuse exactly the pairs of form and backend that the backend refuses."""
    refused = "form=" in (why_not(name, attention_request(form)) or "")
    with refusal(name, form) if refused else contextlib.nullcontext():
        AbsorbedMLAOptions(form=form, core_attention_backend=name)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("name", FORM)
def test_another_gpu(name, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = why_not(name, attention_request(FORM[name]))
    least, newer_too = CAPABILITY[name]
    if capability == least or (newer_too and capability > least):
        assert reason is None
    else:
        assert "compute capability {}.{}".format(*least) in reason


@pytest.mark.parametrize("version", ["3.5.1", "2.0.0"])
@pytest.mark.parametrize("name", ["hopper", "hopper_expanded", "triton"])
def test_old_triton(name, version, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    assert f"{version} is installed" in why_not(name, attention_request(FORM[name]))


def test_deterministic_algorithms():
    with determinism(demanded=True):
        request = attention_request("expanded", deterministic=True)
        for name in ("cudnn", "hopper_expanded"):
            assert "not deterministic" in why_not(name, request)
        assert why_not("transformer_engine", attention_request("expanded")) is None


OLD_CUDNN = "loaded cuDNN 9.18.0; cuDNN 9.19"


@pytest.mark.parametrize(
    ("name", "installed"),
    [("cudnn", "3.5.1 is"), ("flash_attention_4", "3.5.1 is"), ("transformer_engine", OLD_CUDNN)],
)
def test_the_search_for_the_largest_scores_needs_triton_or_cudnn(name, installed, monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.5.1")
    fake_packages.transformer_engine.install(monkeypatch, cudnn=91800)
    te.why_not_installed.cache_clear()
    assert why_not(name, attention_request("expanded")) is None
    reason = why_not(name, attention_request("expanded", max_logits=True))
    assert installed in reason and "qk_clip, log_max_attention_logit" in reason


def test_who_records_largest_scores(monkeypatch):
    """On an H200 the fastest one, unless it must compute all scores again."""
    monkeypatch.setattr(selection, "machine_name", lambda device: "NVIDIA H200")
    able = {"reference", *FUSED}
    work = Work.of(SequenceLayout.dense(8192), 1, 1, causal=True, training=True)
    chosen = {}
    for small in (False, True):
        request = attention_request("expanded", max_logits=True, small_max_logits=small)
        runnable, _ = ATTENTION_BACKENDS.examine("auto", request)
        assert {backend.name for backend in runnable} == able
        found = candidates({"expanded": request}, "auto")
        chosen[small] = fastest(found, V3_DIMS, work)[1].name
    assert chosen == {False: "flash_attention_4", True: "hopper_expanded"}


def test_training_expands_on_a_known_gpu(monkeypatch):
    """Also where flash-attn-4 is not installed; an explicit backend decides the form."""
    monkeypatch.setattr(selection, "machine_name", lambda _: "NVIDIA H200")
    requests = {form: attention_request(form) for form in ("absorbed", "expanded")}
    work = Work.of(SequenceLayout.dense(8192), 1, 1, causal=True, training=True)
    form, found = choose(requests, "auto", V3_DIMS, work)
    assert form == "expanded" and found.name in ("flash_attention_4", "hopper_expanded")
    assert choose(requests, "cudnn", V3_DIMS, work)[0] == "expanded"
    assert choose(requests, "triton", V3_DIMS, work)[0] == "absorbed"


@pytest.mark.parametrize(
    ("layout", "cp_size", "batch", "expected"),
    [
        (SequenceLayout.dense(8), 1, 1, False),
        (SequenceLayout.dense(8), 2, 1, True),
        (SequenceLayout.dense(8), 2, 2, False),
        (SequenceLayout(8, (0, 3), (3, 5), (3, 5), packed=True), 1, 1, True),
    ],
)
def test_who_is_told_of_packs(layout, cp_size, batch, expected, monkeypatch):
    """Packs, and the two parts that a context-parallel rank has of one sequence."""
    seen = []

    def record(requests, *_):
        seen.extend(request.packed for request in requests.values())
        return Candidates((("expanded", ReferenceBackend()),), (), True, CPU)

    monkeypatch.setattr(latent_attention, "candidates", record)
    config = config_for(INTERPRETED)
    dims = MLADims.from_config(config, 1)
    core = LatentCoreAttention(config, dims, AttnMaskType.causal, 0.2, AbsorbedMLAOptions())
    keys = LocalKeys(layout, causal=True)
    core.plan(keys, layout, cp_size, torch.zeros(8, batch, 32), None)
    assert seen == [expected] * 2
