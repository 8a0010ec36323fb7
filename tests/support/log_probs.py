"""Log-probabilities of whole texts: what ``LLM`` computes beside transformers in fp32 and bf16.

The texts are those that ``LLM`` writes greedily, prompts included, and transformers reads them as
they are: a near tie, which rounding decides, changes no later position. What rounding to bf16 costs
is measured on transformers' own model in bf16 over the same texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.outputs import RequestOutput

# Of the error of transformers' model in bf16: another order of roundings has another error. Models
# that choose experts or keys differ most where rounding has made other choices, here or there.
FACTOR, ROUTED_FACTOR = 2.0, 4.0


@dataclass(frozen=True)
class Text:
    """Tokens, and the log-probability of each of the last ones.

    Attributes:
        tokens: Of the prompt and what was generated.
        generated: How many of them were generated.
        log_probs: Of the last tokens: of the generated ones, or of all but the first.
    """

    tokens: list[int]
    generated: int
    log_probs: list[float]


@dataclass(frozen=True)
class Errors:
    """How far log-probabilities are from those of transformers in fp32.

    Attributes:
        worst: Largest absolute difference of all positions.
        rms: Root of the mean square of the differences.
        median: Of the absolute differences.
        positions: How many there are.
        same_choice: Share of the generated tokens that fp32 would have taken, given what is before.
        worst_choice: By how much a generated token is less likely than fp32's choice, at most.
    """

    worst: float
    rms: float
    median: float
    positions: int
    same_choice: float
    worst_choice: float


def written(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, *, prompt_log_probs: bool = True
) -> list[Text]:
    """Texts that ``LLM`` writes greedily, so many tokens behind each prompt.

    With ``prompt_log_probs`` those of the prompts, too; it needs ``prompt_logprobs=True`` then.
    """
    params = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if prompt_log_probs else None,
    )
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    return [text_of(output) for output in outputs]


def text_of(output: RequestOutput) -> Text:
    """Of a request that asked for log-probabilities."""
    [completion] = output.outputs
    found = completion.token_logprobs
    assert found is not None
    prompt, places = output.prompt_token_ids, output.prompt_logprobs
    if places is not None:
        pairs = zip(prompt[1:], places[1:], strict=True)
        found = [*(place[token].logprob for token, place in pairs), *found]
    return Text([*prompt, *completion.token_ids], len(completion.token_ids), found)


@torch.no_grad()
def by_transformers(
    folder: Path, texts: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Log-probabilities of all tokens behind each token, fp64 on the host, [S - 1, V] of each text.

    The checkpoint's weights are computed with in ``dtype``; in fp32 they are not rounded.
    """
    import transformers

    # Grouped products of experts have conditions of their own on dtypes, widths and GPUs.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    model = model.to(device).eval()
    found = []
    for text in texts:
        logits = model(torch.tensor([list(text)], device=device), use_cache=False).logits
        found.append(logits[0, :-1].cpu().double().log_softmax(-1))
    return found


def errors_of(texts: Sequence[Text], expected: Sequence[Tensor]) -> Errors:
    """Of what ``LLM`` computed; ``expected`` is :func:`by_transformers` in fp32."""
    found = [torch.tensor(text.log_probs, dtype=torch.float64) for text in texts]
    return _errors(texts, found, expected)


def errors_of_transformers(
    texts: Sequence[Text], rounded: Sequence[Tensor], expected: Sequence[Tensor]
) -> Errors:
    """Of :func:`by_transformers` in another dtype, over all positions but the first."""
    whole = [replace(text, log_probs=[0.0] * (len(text.tokens) - 1)) for text in texts]
    found = [_of_tokens(text, each) for text, each in zip(whole, rounded, strict=True)]
    return _errors(whole, found, expected)


def _of_tokens(text: Text, log_probs: Tensor) -> Tensor:
    """Of the text's own last tokens."""
    own = log_probs.gather(-1, torch.tensor(text.tokens[1:])[:, None])[:, 0]
    return own[len(own) - len(text.log_probs) :]


def _errors(texts: Sequence[Text], found: Sequence[Tensor], expected: Sequence[Tensor]) -> Errors:
    differences, behind, same = [], [], []
    for text, own, table in zip(texts, found, expected, strict=True):
        differences.append((own - _of_tokens(text, table)).abs())
        last = table[len(table) - text.generated :]
        chosen = torch.tensor(text.tokens[len(text.tokens) - text.generated :])
        best = last.max(-1)
        behind.append(best.values - last.gather(-1, chosen[:, None])[:, 0])
        same.append(chosen == best.indices)
    every = torch.cat(differences)
    # NaN in one place must not be lost in a maximum.
    assert torch.isfinite(every).all(), "a log-probability that is no number"
    return Errors(
        worst=float(every.max()),
        rms=float(every.square().mean().sqrt()),
        median=float(every.median()),
        positions=len(every),
        same_choice=float(torch.cat(same).double().mean()),
        worst_choice=float(torch.cat(behind).max()),
    )


def exceeded(found: Errors, theirs: Errors, factor: float = FACTOR) -> str:
    """What is farther from fp32 than bf16 explains, in words; ``""`` if nothing is.

    The worst position and the mean square may be by ``factor``, the median by :data:`FACTOR`.
    """
    wrong = [
        f"{name} {getattr(found, name):.3g}, transformers' in bf16 {getattr(theirs, name):.3g}"
        for name, most in (("worst", factor), ("rms", factor), ("median", FACTOR))
        if not getattr(found, name) <= most * getattr(theirs, name)
    ]
    # A token is taken instead of a better one if the errors of both add up to the difference.
    if found.worst_choice > 2 * factor * theirs.worst:
        wrong.append(f"a token {found.worst_choice:.3g} less likely than the best was taken")
    return "; ".join(wrong)


def assert_as_exact_as_bf16(
    folder: Path, texts: Sequence[Text], device: torch.device, factor: float = FACTOR
) -> None:
    """Check every position of what ``LLM`` wrote with the model of a folder, in bf16."""
    tokens = [text.tokens for text in texts]
    expected = by_transformers(folder, tokens, torch.float32, device)
    rounded = by_transformers(folder, tokens, torch.bfloat16, device)
    theirs = errors_of_transformers(texts, rounded, expected)
    found = errors_of(texts, expected)
    assert theirs.worst > 0, "transformers' model was not rounded"
    wrong = exceeded(found, theirs, factor)
    assert not wrong, f"{wrong}\n{found}\ntransformers in bf16: {theirs}"
