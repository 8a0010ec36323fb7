"""scripts/generate.py, all but its torchrun: checkpoints, prompts, options, output and faults."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from absorbed_mla.serving.engine import Engine
from tests.support import needs
from tests.support.environment import without_launcher
from tests.support.generate import generate, train
from tests.support.tokenizers import byte_level

pytestmark = needs.no_gpu

SMALL = (
    *("--num-layers", 2, "--moe-layer-freq", "[0,1]", "--hidden-size", 32),
    *("--ffn-hidden-size", 64, "--max-position-embeddings", 512),
)
SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "generate.py"
FEW = ("--num-tokens-to-generate", 8)
GREEDY = (*FEW, "--greedy", "--ignore-eos", "--json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """What train.py saved."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("the quick brown fox\n" * 100)
    options = "--init-method-std 0.4 --train-iters 1 --eval-iters 0 --seq-length 16"
    files = ("--data", folder / "text.txt", "--save", folder / "saved")
    done = train(*SMALL, *options.split(), *files)
    assert done.code == 0, done.err
    return folder / "saved"


@pytest.fixture
def run(checkpoint):
    return lambda *argv, stdin=b"": generate("--load", checkpoint, *argv, stdin=stdin)


def prompted(*prompts: str) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


def continuation(run, prompt: str) -> str:
    done = run("--prompt", prompt, *FEW, "--greedy", "--ignore-eos")
    assert done.code == 0, done.err
    return done.out.removesuffix("\n")


class TestOutput:
    def test_one_prompt(self, run):
        done = run("--prompt", "def f(", *GREEDY, "--return-log-probs")
        row, totals = done.rows
        assert row["prompt"] == "def f("
        assert len(row["tokens"]) == len(row["log_probs"]) == 8
        assert row["finish_reason"] == "length"
        assert row["text"] == continuation(run, "def f(")
        assert totals["generated_tokens"] == 8
        assert totals["tokens_per_second"] == 8 / totals["seconds"]

    def test_several_prompts_in_their_order(self, run):
        """Though they are generated together, and the second ends first."""
        prompts = ["def f(", "x" * 100, "import\tos"]
        done = run(*prompted(*prompts), *FEW, "--greedy", "--ignore-eos")
        titles = ["def f(", "x" * 57 + "...", "import os"]
        assert done.out == "".join(
            f"== {i + 1}: {title}\n{continuation(run, prompt)}\n"
            for i, (title, prompt) in enumerate(zip(titles, prompts))
        )
        assert done.err.startswith("3 prompts, 24 tokens in ")
        assert done.err.endswith(" tokens/s\n")

    def test_the_end_of_the_context(self, run):
        words = ("--prompt", "abcd", "--max-sequence-length", 10, "--ignore-eos", "--json")
        [row, _] = run(*words).rows
        assert (len(row["tokens"]), row["finish_reason"]) == (6, "context")

    def test_text_grows(self, run):
        """Tokens are written as they come, not at the end."""
        sizes = []
        step = Engine.step

        def watched(engine):
            sys.stdout.flush()
            sizes.append(sys.stdout.buffer.tell())
            return step(engine)

        with mock.patch.object(Engine, "step", watched):
            run("--prompt", "def f(", "--num-tokens-to-generate", 20, "--greedy", "--ignore-eos")
        assert len(set(sizes)) > 5


class TestPrompts:
    def test_file_and_stdin(self, run, tmp_path):
        file = tmp_path / "prompts"
        lines = b"def f(\r\nimport os\n\xffhalf \xe2\x82\n"
        file.write_bytes(lines)
        from_file = run("--prompt-file", file, *GREEDY).rows[:-1]
        assert from_file == run(*GREEDY, stdin=lines).rows[:-1]
        assert [row["prompt"] for row in from_file] == ["def f(", "import os", "�half �"]
        given = run(*prompted("def f(", "import os"), *GREEDY).rows[:-1]
        assert from_file[:2] == given

    def test_the_bytes_are_the_prompt(self, run):
        """Invalid UTF-8 reaches a model of bytes as it is."""
        first, second, _ = run(*GREEDY, stdin=b"\xff\n\xfe\n").rows
        assert first["prompt"] == second["prompt"]
        assert first["tokens"] != second["tokens"]

    def test_a_tokenizers_first_token(self, run, tmp_path):
        tokenizer = byte_level()
        tokenizer.add_special_tokens({"bos_token": "<bos>"})
        tokenizer.save_pretrained(tmp_path)
        words = ("--prompt", "ab", "--tokenizer", tmp_path, *GREEDY)
        without, begun = (run(*words, *more).rows for more in ((), ("--add-bos",)))
        assert [rows[-1]["prompt_tokens"] for rows in (without, begun)] == [2, 3]
        assert without[0]["tokens"] != begun[0]["tokens"]

    def test_only_the_last_newline_ends_a_line(self, run):
        done = run(*GREEDY, stdin=b"a\n\nb")
        assert [row.get("error") for row in done.rows[:-1]] == [None, "the prompt is empty", None]


def test_options_reach_the_requests(run):
    with mock.patch.object(Engine, "_add", autospec=True, side_effect=InterruptedError) as add:
        run("--prompt", "ab", "--temperature", 0.5, "--top-p", 0.25, "--ignore-eos", *FEW)
        run("--prompt", "ab", "--top-k", 3, "--top-p", 0.5, *FEW)
        run("--prompt", "ab", "--greedy", "--json", "--return-log-probs")
    requests = [call.args[1] for call in add.call_args_list]
    assert [list(request.prompt) for request in requests] == [[97, 98]] * 3
    names = ("temperature", "top_k", "top_p", "stop_token_ids", "max_tokens", "logprobs")
    assert [tuple(getattr(one.params, name) for name in names) for one in requests] == [
        (0.5, 0, 0.25, (), 8, None),
        (1.0, 3, 0.5, (256,), 8, None),
        (0, 0, 1.0, (256,), 128, 0),
    ]


@pytest.fixture
def made(run):
    """Model and options with which an engine is made for a command."""

    def find(*words: object):
        with mock.patch(
            "absorbed_mla.serving.executor.local.Engine", side_effect=InterruptedError
        ) as engine:
            run(*words)
        return engine.call_args.args

    return find


def test_options_reach_the_attention(made):
    expanded, invariant = (
        made("--prompt", "a", *words.split())[0].decoder.layers[0].self_attention
        for words in (
            "--form expanded --down-projection column_parallel --bf16",
            "--batch-invariant",
        )
    )
    found = expanded.options
    assert (found.form, found.down_projection) == ("expanded", "column_parallel")
    assert (found.batch_invariant, invariant.options.batch_invariant) == (False, True)
    dtypes = [one.linear_proj.weight.dtype for one in (expanded, invariant)]
    assert dtypes == [torch.bfloat16, torch.float32]


class TestOptionsOfTheEngine:
    def test_given(self, made):
        words = "--max-sequence-length 100 --max-requests 2 --cache-tokens 640 --step-tokens 128"
        words += " --no-prefix-caching --seed 7"
        _, options = made(*prompted("a", "a", "a"), *words.split())
        assert (options.max_sequence_length, options.max_requests) == (100, 2)
        assert (options.cache_tokens, options.step_tokens, options.seed) == (640, 128 + 2, 7)
        assert options.vocab_size == 257
        assert options.chunked_prefill and not options.prefix_caching

    def test_no_larger_than_prompts_need(self, made):
        _, options = made(*prompted("a", "ab"), *FEW)
        assert (options.max_sequence_length, options.max_requests) == (10, 2)
        assert options.cache_tokens == 2 * 64
        assert options.chunked_prefill and options.prefix_caching
        # The second is refused.
        _, options = made(*prompted("a", "x" * 512), *FEW)
        assert (options.max_sequence_length, options.cache_tokens) == (512, 64)

    def test_no_chunks(self, run):
        done = run("--prompt", "x" * 66, *GREEDY, "--step-tokens", 64, "--no-chunked-prefill")
        assert done.code == 1
        assert done.rows[0]["error"] == "the prompt has 66 tokens, a step without chunks 65"


def test_a_prefix_cache_that_outlives_the_process(run, tmp_path):
    """An option of ``LLM`` that the command knows by its declaration alone."""
    words = ("--prompt", "x" * 150, *GREEDY, "--prefix-cache-dir", tmp_path)
    [first, _], files = run(*words).rows, list(tmp_path.rglob("*.safetensors"))
    assert files and all(file.stat().st_size for file in files)
    assert run(*words).rows[0] == first


def test_parity_mode_changes_no_token(run):
    words = (*prompted("def f(x):", "y" * 90), *GREEDY)
    expected, found = (
        [row["tokens"] for row in run(*words, *more).rows[:-1]]
        for more in ([], ["--batch-invariant"])
    )
    assert found == expected


def test_seeds(run):
    words = ("--prompt", "def f(x):", *FEW, "--json", "--ignore-eos", "--seed")
    first, again, other = (run(*words, seed).rows[0]["tokens"] for seed in (1, 1, 2))
    assert first == again != other


def test_a_described_model(checkpoint, run):
    """What a checkpoint without arguments needs."""
    words = ("--prompt", "def f(", *GREEDY, "--preset", "tiny")
    done = run(*words, *SMALL)
    assert done.code == 0, done.err
    assert done.rows[0] == run("--prompt", "def f(", *GREEDY).rows[0]


class TestFaults:
    def test_others_are_unharmed(self, run):
        prompts = ["def f(", "x" * 600, "", "import os"]
        done = run(*prompted(*prompts), *FEW, "--greedy", "--ignore-eos")
        assert done.code == 1
        assert done.err.splitlines()[:2] == [
            "prompt 2: error: the prompt has 600 tokens and must be shorter than 512",
            "prompt 3: error: the prompt is empty",
        ]
        assert "4 prompts (2 failed), 16 tokens" in done.err
        assert f"== 4: import os\n{continuation(run, 'import os')}\n" in done.out

    def test_a_model_that_fails(self, run):
        """Its logits for one prompt are NaN."""
        forward = GPTModel.forward

        def broken(model, input_ids, *args, **options):
            output = forward(model, input_ids, *args, **options)
            return output * torch.nan if (input_ids == ord("!")).any() else output

        with mock.patch.object(GPTModel, "forward", broken):
            done = run("--prompt", "a!", *FEW, "--ignore-eos")
        assert done.code == 1
        assert done.err.startswith("prompt 1: error: the model's logits are NaN or infinite")
        assert "1 prompt (1 failed), 0 tokens" in done.err

    def test_a_cache_that_is_too_small(self, run):
        done = run(*prompted("x" * 100, "a"), *GREEDY, "--cache-tokens", 64)
        assert done.code == 1
        bad, good, totals = done.rows
        assert "do not fit into a cache of 64" in bad["error"]
        assert len(good["tokens"]) == 8
        assert (totals["prompts"], totals["failed"]) == (2, 1)

    @pytest.mark.parametrize(
        "words, error",
        [
            ("--seed -1", "--seed must be at least 0"),
            ("--max-sequence-length 513", "--max-position-embeddings 512, got 513"),
            ("--tokenizer absent", "--tokenizer must be a folder or 'bytes', got 'absent'"),
            ("--fp16", "--fp16 needs a GPU"),
            ("--cuda-graphs", "--cuda-graphs needs a GPU"),
            ("--add-bos", "--add-bos: "),
        ],
    )
    def test_before_any_work(self, run, words, error):
        done = run("--prompt", "a", *words.split())
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("generate.py: error: ") and error in done.err
        assert done.err.count("\n") == 1

    def test_no_prompt(self, run):
        done = run()
        assert done.code == 2 and "there is no prompt in stdin" in done.err

    def test_unknown_checkpoints(self, tmp_path):
        for folder in (tmp_path / "absent", tmp_path):
            done = generate("--load", folder, "--prompt", "a")
            assert (done.code, done.out) == (2, "")
            assert str(folder) in done.err

    def test_a_tokenizer_with_more_tokens_than_the_model(self, run, tmp_path):
        tokenizer = byte_level()
        tokenizer.add_tokens([f"<{i}>" for i in range(64)])
        tokenizer.save_pretrained(tmp_path)
        done = run("--prompt", "a", "--tokenizer", tmp_path)
        assert done.code == 2
        assert "has 321 tokens, but the model" in done.err

    def test_a_tokenizer_that_seems_too_small_is_mentioned(self, run):
        """Bytes, for a model of a hundred thousand tokens; here, for fewer."""
        with mock.patch("generation.model._USUAL_PADDING", -600):
            done = run("--prompt", "a", *FEW)
        assert done.code == 0
        assert "warning: bytes (no --tokenizer) has 257 tokens, but the model 320" in done.err
        assert "warning" not in run("--prompt", "a", *FEW).err

    def test_interrupted(self, run):
        with mock.patch.object(Engine, "step", side_effect=KeyboardInterrupt):
            assert run("--prompt", "a", *FEW).code == 130

    def test_nobody_reads(self, run):
        with (
            mock.patch("generation.output.TextOutput._write", side_effect=BrokenPipeError),
            mock.patch("console.script._discard_output"),
        ):
            done = run("--prompt", "a", *FEW)
        assert (done.code, done.err) == (1, "")


def test_in_a_process_of_its_own(checkpoint, run):
    """With a locale that knows no such characters."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--load", checkpoint, *map(str, GREEDY[:-1])],
        input="ü€\n".encode(),
        # PyTorch 2.13's compiler reads its own files in the locale's encoding.
        env=without_launcher(
            LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", TORCHDYNAMO_DISABLE="1"
        ),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == continuation(run, "ü€") + "\n"
    assert done.stderr.startswith(b"1 prompt, 8 tokens in ")


@pytest.mark.usefixtures("forked_python")
def test_ctrl_c_in_a_process_of_its_own(checkpoint):
    """Megatron's engine would print the stacks of all threads."""
    words = ("--prompt", "a", "--num-tokens-to-generate", "500", "--ignore-eos", "--seed", "3")
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--load", checkpoint, *words],
        env=without_launcher(TORCHDYNAMO_DISABLE="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1)  # it is in the middle of its work
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, b"generate.py: interrupted\n")


def test_rows_are_json(run):
    """Whatever the model writes."""
    done = run("--prompt", "\udcff\u2028", *FEW, "--json", "--temperature", 5)
    assert all(json.loads(line) for line in done.out.splitlines())
