"""The kernels over the latent against the reference, on the inputs that kernels get wrong.

Without a GPU the ``triton`` kernels run in Triton's interpreter, on the same blocks as on a GPU.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.backends import triton
from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.latent_kernels import LatentKernelBackend
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.registry import ATTENTION_BACKENDS
from tests.support import needs
from tests.support.backends import attention_request, determinism, triton_interpreter
from tests.support.hostile import Case, evaluate, named, poisoned_memory
from tests.support.numerics import relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"


# Triton decides when a kernel is decorated.
with triton_interpreter():
    import absorbed_mla.kernels.triton.backward
    import absorbed_mla.kernels.triton.forward  # noqa: F401


@pytest.fixture(autouse=True)
def _settings():
    """Without the suite's deterministic mode, in which 'hopper' does not add with atomics."""
    with determinism(demanded=False), triton_interpreter():
        yield


TRITON, HOPPER = ATTENTION_BACKENDS["triton"], ATTENTION_BACKENDS["hopper"]


def refuses(name: str, case: Case) -> str | None:
    request = attention_request(
        "absorbed",
        device=DEVICE,
        dtype=case.dtype,
        key_width=case.content + case.rope,
        value_width=case.content,
    )
    if name == "triton" and case.dtype == torch.float32:
        return None  # refused on a GPU for its speed alone
    return ATTENTION_BACKENDS[name].why_not(request)


def backend_for(name: str, case: Case) -> LatentKernelBackend:
    """The backend, unless it cannot run here."""
    # 'triton' also runs in Triton's interpreter.
    if name == "hopper" and not ON_GPU:
        pytest.skip(needs.NEEDS_GPU)
    if reason := refuses(name, case):
        pytest.skip(f"{name}: {reason}")
    return ATTENTION_BACKENDS[name]


def compute(
    backend, case: Case, operands: AttentionInputs, grad: OutputGradient
) -> dict[str, Tensor]:
    attended = backend.forward(operands, case.rules)
    return named(attended, backend.backward(grad, attended, operands, case.rules))


def largest_scores(
    backend, case: Case, operands: AttentionInputs
) -> tuple[Tensor, AttentionOutput]:
    """The largest score of each head, and the attention's result."""
    recorded = MaxLogits(torch.full((case.heads,), -torch.inf, device=DEVICE))
    output = backend.forward(operands, replace(case.rules, max_logits=recorded))
    return recorded.of_heads, output


@functools.lru_cache(maxsize=1)
def expected(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results in fp64, and those of PyTorch in the dtype of the case."""
    operands, grad = case.operands(DEVICE), case.gradient(DEVICE)
    double = AttentionInputs(*(x.double() for x in operands[:4]), None)
    double_grad = OutputGradient(*(x if x is None else x.double() for x in grad))
    exact = compute(ReferenceBackend(), case, double, double_grad)
    return exact, evaluate(case, operands, grad, case.dtype)


def check(actual: dict[str, Tensor], case: Case) -> None:
    """Finite, exact zeros where nothing is seen, at most twice the error of PyTorch's own."""
    exact, eager = expected(case)
    unseen_query, unseen_key = (~case.visible().to(DEVICE).any(dim) for dim in (1, 0))
    assert (actual["lse"][unseen_query] == -torch.inf).all()
    for name, tensor in actual.items():
        if not tensor.numel():
            continue
        seen, truth, plain = tensor, exact[name], eager[name]
        if name == "lse":
            seen, truth, plain = (x[~unseen_query] for x in (seen, truth, plain))
        else:
            unseen = unseen_key if name in ("dlatent", "dk_rope") else unseen_query
            assert (tensor[unseen] == 0).all(), f"{name} of what nothing is seen of, or by"
        assert torch.isfinite(seen).all(), name
        # A sum of terms that cancel has no relative error: their rounding counts as well.
        floor = torch.finfo(case.dtype).eps / 4
        error, plain_error = (relative_error(x, truth) for x in (seen, plain))
        assert error <= 2 * plain_error + floor, f"{name}: {error:.2e}, PyTorch {plain_error:.2e}"


CAUSAL = (Span(0, 37, 0, 37, 0),)
PACK = (Span(0, 1, 0, 1, 0), Span(3, 20, 3, 20, 0), Span(24, 37, 24, 37, 0))
# Two pieces of a rank of context parallelism: keys are shared, and longer than the queries.
ZIGZAG = (Span(0, 9, 0, 9, 0), Span(9, 30, 0, 75, 54))
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

CASES = {
    "causal": Case(37, 37, CAUSAL),
    "causal_fp16": Case(37, 37, CAUSAL, dtype=FP16, content=64),
    "causal_fp32": Case(37, 37, CAUSAL, dtype=FP32, content=16, heads=4),
    "all_keys": Case(5, 70, (Span(0, 5, 0, 70, None),), lse_gradient=False),
    "padding_between_sequences": Case(37, 37, PACK, heads=6, batch=2),
    "bottom_right": Case(3, 70, (Span(0, 3, 0, 70, 67),), dtype=FP32, heads=8, rope=0),
    "zigzag": Case(30, 75, ZIGZAG, heads=8),
    "one_token": Case(1, 1, (Span(0, 1, 0, 1, 0),), dtype=FP16),
    "one_query_many_keys": Case(1, 200, (Span(0, 1, 0, 200, None),)),
    "many_queries_one_key": Case(40, 1, (Span(0, 40, 0, 1, None),), heads=2),
    "first_queries_see_nothing": Case(20, 33, (Span(2, 20, 1, 33, -5),), batch=2, heads=8),
    "nobody_sees_anything": Case(7, 9, (Span(1, 6, 0, 9, -8),), batch=2),
    "no_sequence": Case(5, 6, ()),
    "huge_scores": Case(37, 37, CAUSAL, magnitude=40.0),
    "huge_scores_fp16": Case(20, 20, (Span(0, 20, 0, 20, 0),), magnitude=25.0, dtype=FP16),
    "tiny_scores": Case(37, 37, CAUSAL, magnitude=1e-3),
    "strided_columns": Case(11, 13, (Span(0, 11, 0, 13, 2),), last_stride=2),
    "heads_128": Case(4, 70, (Span(0, 4, 0, 70, 66),), heads=128),
    "odd_heads": Case(70, 7, (Span(0, 70, 0, 7, None),), heads=3),
    "width_512": Case(19, 19, (Span(0, 19, 0, 19, 0),), content=512, rope=64),
    "width_512_fp16": Case(5, 67, (Span(0, 5, 0, 67, 62),), content=512, rope=64, dtype=FP16),
    "width_256": Case(13, 70, (Span(1, 13, 3, 68, 53),), content=256, rope=64, heads=20, batch=2),
    "width_128": Case(37, 37, PACK, content=128, rope=32, heads=8, batch=2),
}
if ON_GPU:
    # The shapes of DeepSeek-V3, which the interpreter is too slow for.
    DEEP = Case(300, 300, (Span(0, 300, 0, 300, 0),), content=512, rope=64)
    LONG = (Span(0, 1, 0, 1, 0), Span(5, 700, 5, 700, 0), Span(703, 1500, 703, 1500, 0))
    CASES |= {
        **{f"deep_{heads}": replace(DEEP, heads=heads, batch=2) for heads in (8, 16, 20, 128)},
        "deep_fp16": replace(DEEP, dtype=FP16),
        "deep_pack": Case(1501, 1501, LONG, content=512, rope=64),
        "deep_zigzag": replace(CASES["zigzag"], content=512, rope=64),
        "deep_blind": replace(CASES["first_queries_see_nothing"], content=512, rope=64),
        "deep_nobody": replace(CASES["nobody_sees_anything"], content=512, rope=64),
        "deep_huge": replace(DEEP, magnitude=15.0),
        "deep_one_token": replace(CASES["one_token"], content=512, rope=64),
        "deep_one_query": Case(1, 5000, (Span(0, 1, 0, 5000, None),), content=512, rope=64),
    }


def of_hopper(case: Case) -> bool:
    """Whether the kernels for Hopper have these widths and this dtype."""
    return case.content in (128, 256, 512) and case.rope in (32, 64) and case.dtype != FP32


KERNELS = pytest.mark.parametrize("kernel", ["triton", "hopper"])


class TestEveryCase:
    @pytest.mark.no_cover
    @pytest.mark.parametrize(
        ("kernel", "name"),
        [("triton", name) for name in CASES]
        + [("hopper", name) for name, case in CASES.items() if of_hopper(case)],
    )
    def test_equals_the_reference(self, kernel, name):
        """Amid NaN in every buffer that they may not read, and in those that they must write."""
        case = CASES[name]
        backend = backend_for(kernel, case)
        inputs = case.hide(case.operands(DEVICE), case.gradient(DEVICE))
        with poisoned_memory():
            actual = compute(backend, case, *inputs)
        check(actual, case)

    @pytest.mark.no_cover
    @pytest.mark.parametrize(
        ("kernel", "name"),
        [("triton", name) for name in ("padding_between_sequences", "zigzag", "no_sequence")]
        + [("triton", "first_queries_see_nothing"), ("triton", "huge_scores")]
        + [("hopper", name) for name in CASES if name.startswith("deep")],
    )
    def test_largest_scores(self, kernel, name):
        """Those of all heads, each of some queries and keys that see each other."""
        case = CASES[name]
        backend = backend_for(kernel, case)
        operands, _ = case.hide(case.operands(DEVICE), case.gradient(DEVICE))
        with poisoned_memory():
            found, output = largest_scores(backend, case, operands)
        double = AttentionInputs(*(x.double() for x in operands[:4]), None)
        expected, _ = largest_scores(ReferenceBackend(), case, double)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        without = backend.forward(operands, case.rules)
        assert all(map(torch.equal, output, without)), "other results, because they are recorded"

    @KERNELS
    def test_parts_of_the_keys(self, kernel):
        """As in a ring: every part's gradient comes from the output and LSE over all keys."""
        case = replace(CASES["width_128"], queries=20, keys=90, spans=(Span(0, 20, 0, 90, 70),))
        backend, operands = backend_for(kernel, case), case.operands(DEVICE)
        grad, (exact, _) = case.gradient(DEVICE), expected(case)
        attended = AttentionOutput(exact["out"].to(case.dtype), exact["lse"].float())
        total = {name: torch.zeros_like(x) for name, x in exact.items()}
        # Causal alignment cuts the second part: its key j is key j + 64 of all.
        for keys, offset in ((slice(0, 64), None), (slice(64, 90), 6)):
            part = AttentionInputs(*operands[:2], *(x[keys] for x in operands[2:4]), None)
            rules = replace(case.rules, spans=(Span(0, 20, 0, len(part.k_rope), offset),))
            grads = named(attended, backend.backward(grad, attended, part, rules))
            for name in ("dq_content", "dq_rope"):
                total[name] += grads[name]
            for name in ("dlatent", "dk_rope"):
                total[name][keys] += grads[name]
        for name in ("dq_content", "dq_rope", "dlatent", "dk_rope"):
            assert relative_error(total[name], exact[name]) < 6e-3, name

    @KERNELS
    def test_gradient_of_a_sum(self, kernel):
        """It is one number, expanded: every stride is 0."""
        case = replace(CASES["width_128"], heads=2, lse_gradient=False)
        backend, operands = backend_for(kernel, case), case.operands(DEVICE)
        one = torch.ones((), dtype=case.dtype, device=DEVICE)
        attended = backend.forward(operands, case.rules)
        shape = attended.out.shape
        results = [
            named(
                attended, backend.backward(OutputGradient(g, None), attended, operands, case.rules)
            )
            for g in (one.expand(shape), torch.ones(shape, dtype=case.dtype, device=DEVICE))
        ]
        for name, tensor in results[0].items():
            assert torch.allclose(tensor, results[1][name], rtol=1e-3, atol=1e-5), name

    @pytest.mark.no_cover
    @pytest.mark.parametrize("name", [name for name, case in CASES.items() if of_hopper(case)])
    def test_deterministic_hopper(self, name):
        """From what it stores of all pairs of a part of the queries."""
        torch.use_deterministic_algorithms(True)
        self.test_equals_the_reference("hopper", name)

    @KERNELS
    def test_the_same_bits_again(self, kernel):
        """Also where splits are added up; 'hopper' stores P and dS for it."""
        case = CASES["deep_pack" if ON_GPU else "zigzag"]
        backend = backend_for(kernel, case)
        torch.use_deterministic_algorithms(True)
        inputs = case.operands(DEVICE), case.gradient(DEVICE)
        first = compute(backend, case, *inputs)
        for _ in range(10 if ON_GPU else 1):
            again = compute(backend, case, *inputs)
            assert all(torch.equal(first[name], again[name]) for name in first)


class TestTables:
    def test_are_made_once(self):
        """Whatever the layer, forward or backward."""
        case = CASES["causal"]
        operands = case.operands(DEVICE)
        first, second = (TRITON._query_tiles(operands, case.spans).data_ptr() for _ in range(2))
        assert first == second

    def test_serve_training_after_evaluation(self):
        case = replace(CASES["one_token"], spans=(Span(0, 1, 0, 1, None),))
        operands, grad = case.operands(DEVICE), case.gradient(DEVICE)
        backend = TRITON
        with torch.inference_mode():
            backend.forward(operands, case.rules)
        table = TRITON._query_tiles(operands, case.spans)
        assert not table.is_inference()
        check(compute(backend, case, operands, grad), case)


class TestOperators:
    """``torch.library.opcheck``: schema, shapes without data, and tracing."""

    def arguments(self, kernel: str) -> tuple[tuple, tuple]:
        case = CASES["width_128"] if ON_GPU else CASES["first_queries_see_nothing"]
        backend = backend_for(kernel, case)
        inputs, grad = case.operands(DEVICE), case.gradient(DEVICE)
        # Keys are tiles or parts, as the kernel has them, or none.
        tiles, keys, buffers = backend.backward_tables(inputs, case.rules.spans)
        operands = (inputs.q_content, inputs.q_rope, inputs.k_content.squeeze(2), inputs.k_rope)
        forward = (*operands, tiles, case.rules.scale, kernel)
        out, lse, _ = torch.ops.absorbed_mla.latent_attention_forward(*forward)
        backward = (*grad, out, lse, *operands, tiles, keys, buffers, case.rules.scale, kernel)
        return forward, backward

    @KERNELS
    def test_opcheck(self, kernel):
        forward, backward = self.arguments(kernel)
        ops = torch.ops.absorbed_mla
        torch.library.opcheck(ops.latent_attention_forward.default, forward)
        torch.library.opcheck(ops.latent_attention_forward.default, (*forward, True))
        torch.library.opcheck(ops.latent_attention_backward.default, backward)


def test_the_interpreter_is_chosen_by_nobody_else(monkeypatch):
    """A CPU has the reference, unless TRITON_INTERPRET asks for the interpreter."""
    request = attention_request("absorbed", device=torch.device("cpu"))
    if not ON_GPU:
        assert TRITON.why_not(request) is None
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert TRITON.why_not(request) == "it needs a GPU"


def test_rows_too_long_for_shared_memory(monkeypatch):
    """512 + 64 in fp32 on a GPU with 99 KiB, for example."""
    monkeypatch.setattr(triton.launch, "shared_memory", lambda device: (101376, False))
    launch = triton.launch.launch_for.__wrapped__
    assert launch(torch.bfloat16, 512, 64, DEVICE).query.rows == 16
    with pytest.raises(ValueError, match="too long for shared memory"):
        launch(torch.float32, 512, 64, DEVICE)
