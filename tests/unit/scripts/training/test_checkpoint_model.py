"""--load of a checkpoint of another model is one line of error before a model is built.

If these fail, a mistyped preset initialises hundreds of gigabytes of weights for nothing, or
weights compute another function without a warning.
"""

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from tests.support.generate import generate, train
from tests.support.refusal import refusal
from tests.support.train_arguments import checked, resolved_from, saved, start_of
from training.arguments import model_of
from training.checkpoint import Start, find_checkpoint, read_start
from training.checkpoint_model import (
    require_same_model,
    require_same_run,
    sizes_of_model,
    sizes_of_tensors,
)
from training.presets import PRESETS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 on the CPU")

SMALL = (
    "--num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 "
    "--max-position-embeddings 512"
)
INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 16"
DSA = f"--experimental-attention-variant dsa {INDEXER}"


def compare(start: Start, line: str = "", script: str = "train.py") -> None:
    require_same_model(checked(f"--vocab-size 320 {line}"), start, script)


@contextlib.contextmanager
def building_is_a_mistake() -> Iterator[None]:
    """Fail if a model is built, which could have hundreds of gigabytes."""
    with (
        mock.patch("generation.run.load_model", side_effect=AssertionError),
        mock.patch("training.run.training_config", side_effect=AssertionError),
        mock.patch("training.run.megatron_loop.pretrain", side_effect=AssertionError),
    ):
        yield


class TestDescribed:
    @pytest.mark.parametrize("name", PRESETS)
    def test_the_same(self, name, capsys):
        require_same_model(checked(f"--preset {name}"), start_of(f"--preset {name}"), "train.py")
        assert capsys.readouterr().err == ""

    def test_all_that_differs_in_one_line(self):
        with pytest.raises(ValueError) as error:
            compare(start_of(), "--preset deepseek-v3 --vocab-size 129280")
        text = str(error.value)
        assert "\n" not in text
        assert text.startswith(
            "--load: there does not hold the model requested (--preset deepseek-v3): "
            "--vocab-size 320 in the checkpoint, 129280 requested; --num-layers 3 in the "
        )
        for name in ("ffn-hidden-size", "num-attention-heads", "q-lora-rank", "num-experts"):
            assert f"--{name} " in text
        assert text.endswith("--use-checkpoint-args takes the checkpoint's own")

    def test_generate_takes_the_checkpoints_model_by_itself(self):
        with pytest.raises(ValueError, match="; without --preset the model is the checkpoint's"):
            compare(start_of(), "--preset moonlight", "generate.py")

    @pytest.mark.parametrize(
        ("line", "there", "here"),
        [
            ("--v-head-dim 16", "32", "16"),
            ("--q-lora-rank 0", "64", "none"),
            ("--num-experts 8", "4", "8"),
            ("--moe-ffn-hidden-size 64", "128", "64"),
            ("--moe-shared-expert-intermediate-size 0", "128", "none"),
            ("--moe-layer-freq [0,1,1]", "2 dense and 1 MoE layers", "1 dense and 2 MoE layers"),
        ],
    )
    def test_one_size(self, line, there, here):
        with refusal(f": {line.split()[0]} {there} in the checkpoint, {here} requested; --use"):
            compare(start_of(), line)

    def test_the_same_weights_and_another_function_are_a_warning(self, capsys):
        compare(start_of(), "--rotary-base 500000 --moe-router-topk 1")
        assert capsys.readouterr().err == (
            "train.py: warning: the model in there has other options: --rotary-base 10000 in the "
            "checkpoint, 500000 requested; --moe-router-topk 2 in the checkpoint, 1 requested\n"
        )
        # The length, the balancing, and YaRN's fields without YaRN may be chosen.
        free = "--max-position-embeddings 256 --moe-aux-loss-coeff 1 --rotary-scaling-factor 9"
        compare(start_of(), free)
        assert capsys.readouterr().err == ""


def assert_found(shapes: dict[str, tuple[int, ...]], model: dict) -> None:
    """The shapes show the model's sizes, whichever they show."""
    found, wanted = sizes_of_tensors(shapes), sizes_of_model(model)
    assert found == {name: wanted[name] for name in found}


class TestTensors:
    """A checkpoint without arguments: the shapes of its tensors are compared."""

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory) -> Path:
        """A folder with a checkpoint of train.py and its data."""
        folder = tmp_path_factory.mktemp("saved")
        (folder / "text.txt").write_text("the quick brown fox\n" * 100)
        options = "--train-iters 1 --eval-iters 0 --seq-length 16"
        files = ("--data", folder / "text.txt", "--save", folder / "run")
        done = train(*SMALL.split(), *options.split(), *files)
        assert done.code == 0, done.err
        return folder

    @staticmethod
    def shapes(saved: Path) -> dict[str, tuple[int, ...]]:
        found = dist_checkpointing.load_tensors_metadata(str(saved / "run" / "iter_0000001"))
        return {name: tuple(tensor.global_shape) for name, tensor in found.items()}

    def test_sizes(self, saved):
        shapes, model = self.shapes(saved), model_of(checked(SMALL))
        assert len(sizes_of_tensors(shapes)) == 13
        assert_found(shapes, model)
        # Megatron writes one tensor for all layers where all layers are alike.
        layer = "decoder.layers.0."
        stacked = {
            name.replace("layers.0.", "layers."): (7, *shape) if name.startswith(layer) else shape
            for name, shape in shapes.items()
            if not name.startswith("decoder.layers.1.")
        }
        assert_found(stacked, model | {"num_layers": 7, "num_experts": None, "moe_layer_freq": 1})

    def test_without_arguments(self, saved):
        start = Start(saved / "run" / "iter_0000001", None)
        compare(start, SMALL)
        with pytest.raises(ValueError) as error:
            compare(start, f"{SMALL} --kv-lora-rank 64 --num-experts 8")
        assert "; --num-experts 4 in the checkpoint, 8 requested; " in str(error.value)
        with pytest.raises(ValueError, match=r"--num-attention-heads x \(--qk-head-dim \+ --v-he"):
            compare(start, f"{SMALL} --num-attention-heads 8")

    def test_arguments_of_another_kind_of_model(self, saved):
        """The arguments do not describe an MLA model, so the tensors are compared."""
        start = read_start(str(saved / "run"), finetune=True)
        start.args.multi_latent_attention = False
        compare(start, SMALL)
        with pytest.raises(ValueError, match="--hidden-size 32 in the checkpoint, 128 requested"):
            compare(start)

    def test_a_run_is_resumed_from_its_own_folder(self, saved, tmp_path):
        assert read_start(str(saved / "run" / "iter_0000001"), finetune=False).iteration == 1
        shutil.copytree(saved / "run" / "iter_0000001", tmp_path / "mine")
        with pytest.raises(ValueError, match=r"mine must be called .*iter_0000001 to be resumed"):
            read_start(str(tmp_path / "mine"), finetune=False)

    @pytest.mark.parametrize("run", [generate, train])
    def test_nothing_is_built(self, saved, run):
        with building_is_a_mistake():
            more = ("--prompt", "a") if run is generate else ("--finetune",)
            done = run("--load", saved / "run", "--preset", "deepseek-v3", *more)
        assert (done.code, done.out) == (2, "")
        assert done.err.count("\n") == 1
        assert "; --num-layers 2 in the checkpoint, 61 requested; --hidden-size 32 in " in done.err

    def test_a_run_is_resumed_with_its_options(self, saved):
        options = "--train-iters 2 --eval-iters 0 --seq-length 16 --seed 7 --kv-lora-rank 16"
        files = ("--data", saved / "text.txt", "--load", saved / "run")
        with building_is_a_mistake():
            done = train(*SMALL.split(), *options.split(), *files)
        assert done.code == 2
        assert "differs from this one: --seed 1234 there, 7 here; --kv-lora-rank 32 th" in done.err
        assert done.err.count("\n") == 1


class TestSparseAttention:
    """A dense checkpoint becomes sparse where its user says so, and not otherwise."""

    NEW = f"--load there --new-indexer {INDEXER}"

    @pytest.mark.parametrize(
        ("there", "here", "error"),
        [
            ("", DSA, "variant none in the checkpoint, dsa requested"),
            ("", f"{NEW} --hidden-size 64", "--hidden-size 128 in the checkpoint, 64 requested"),
            (DSA, NEW, "variant dsa in the checkpoint, none requested"),
            ("", NEW, None),
        ],
        ids=["silently", "of another size", "replaced", "explicitly"],
    )
    def test_a_new_indexer(self, capsys, there, here, error):
        if error is None:
            compare(start_of(there), here)
            assert capsys.readouterr().err == ""
            return
        with refusal(error):
            compare(start_of(there), here)

    def test_of_a_checkpoint_that_describes_its_model(self, monkeypatch):
        def resolve(there: str, more: str) -> tuple:
            model = model_of(resolved_from(saved(there), monkeypatch, more))
            return model["experimental_attention_variant"], model["dsa_indexer_topk"]

        new = f"--new-indexer {INDEXER}"
        assert (resolve("", new), resolve("", "")) == (("dsa", 16), (None, None))
        with refusal("in --load there has an indexer; leave the option"):
            resolve(DSA, new)
        # The warm-up saves the model's own top-k.
        assert resolve(f"{DSA} --train-only indexer", "") == ("dsa", 16)


@pytest.mark.parametrize(
    ("there", "here", "error"),
    [
        ("", {"data_fingerprint": "other"}, "this one: the data (--data, --tokenizer). To resume"),
        # The optimizer's state is of other parameters.
        (
            f"{DSA} --train-only indexer",
            {"train_only": None},
            "--train-only indexer there, None here. To resume",
        ),
    ],
    ids=["data", "stage"],
)
def test_another_run(there, here, error):
    start = Start(Path("there"), saved(there), 5)
    require_same_run(start, saved(there))
    with refusal(error):
        require_same_run(start, saved(there, **here))


class TestOtherFormats:
    def test_hugging_face(self, tmp_path):
        folder = tmp_path / "with space"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
        command = f"absorbed-mla-convert convert {shlex.quote(str(folder))} OUT --to absorbed"
        with refusal(f"it is a Hugging Face checkpoint: {command} makes one"):
            find_checkpoint(str(folder))

    def test_a_file_for_each_rank(self, tmp_path):
        (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
        with refusal("it is a checkpoint with a file for each rank: absor"):
            find_checkpoint(str(tmp_path))

    def test_none(self, tmp_path):
        (tmp_path / "file").touch()
        for path, why in (
            (tmp_path, "(no metadata.json)"),
            (tmp_path / "absent", "absent: there is no such folder"),
            (tmp_path / "file", "file: it is not a folder"),
        ):
            with refusal("--load", why):
                find_checkpoint(str(path))

    def test_options_that_were_not_given_are_not_named(self, tmp_path):
        """generate.py takes the model from the checkpoint without --use-checkpoint-args."""
        weight = ShardedTensor.from_rank_offsets("weight", torch.ones(2))
        (tmp_path / "bare").mkdir()
        dist_checkpointing.save({"weight": weight}, str(tmp_path / "bare"))
        done = generate("--load", tmp_path / "bare", "--prompt", "a")
        assert done.code == 2
        assert "bare contains no arguments that describe its model; describe it" in done.err
        assert "--use-checkpoint-args" not in done.err
