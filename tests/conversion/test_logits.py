"""The same tokens through transformers and, after conversion, through Megatron: the same logits.

In float32 on a CPU, for models of every kind, within and beyond the context that YaRN extends. What
a wrong conversion would do is measured beside it, so that the bound is known to mean something.
Sparse models choose fewer keys than most tokens see: a wrong indexer changes logits by percents.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_conversion import logits
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.logits import (
    checkpoint_logits,
    load_megatron_model,
    megatron_logits,
    megatron_model,
    transformers_model,
    without_mtp,
)
from checkpoint_conversion.megatron_args import megatron_notes
from checkpoint_conversion.model import ModelConfig
from tests.conversion.converted import loaded_logits
from tests.conversion.legacy_support import write_legacy
from tests.conversion.models import (
    ARCHITECTURES,
    EVALUATED,
    KIMI_K25,
    MISTRAL3,
    ORIGINAL_CONTEXT,
    OTHERS,
    SPARSE,
    Architecture,
    logits_of,
    make_model,
    save,
    token_batch,
    with_half_split_rope,
    with_rope,
)
from tests.conversion.support import load_all, random_tensors, tiny_config, write_hugging_face
from tests.support.combinations import covering, thinned
from tests.support.refusal import refusal

Tensors = dict[str, LazyTensor]
# Of the largest logit; float32 sums in another order stay 10 times below.
TOLERANCE = 1e-4
# What a wrong conversion exceeds.
WRONG = 1e-2
V2_MOE = Architecture("v2", q_lora=True, moe=True, rope="yarn")
V3_MOE = Architecture("v3", q_lora=True, moe=True, rope="yarn")
V3_DENSE = Architecture("v3", q_lora=False, moe=False, rope="rope")
_ROWS = {astuple(one): one for one in ARCHITECTURES}
DENSE_ATTENTION = {
    _ROWS[row].name.replace(" ", "-"): _ROWS[row]
    for row in (covering([astuple(V3_MOE), *_ROWS], 2) if thinned() else _ROWS)
}
SPARSE_ATTENTION = {name: one for name, one in EVALUATED.items() if one in SPARSE.values()}


@dataclass(frozen=True)
class Case:
    """A model of transformers, the folder it is saved in, and what it computes."""

    architecture: Architecture
    folder: Path
    tokens: Tensor
    expected: Tensor

    @classmethod
    def of(cls, architecture: Architecture, folder: Path, **changes) -> Case:
        model = make_model(architecture, **changes)
        tokens = token_batch()
        return cls(architecture, save(model, folder), tokens, logits_of(model, tokens))

    def converted(self, to: str) -> Path:
        """The same model in another format, beside this one; converted once."""
        target = self.folder.parent / to
        if not target.exists():
            convert(self.folder, target, to)
        return target

    def error(self, logits: Tensor, to: str = "absorbed") -> float:
        """Largest difference of a logit, relative to the largest one; infinite where not finite.

        Of what Megatron's own attention evaluates, within the context where no query is scaled.
        """
        assert logits.shape == self.expected.shape
        own = to != "absorbed" and self.architecture.family in ("mistral3", "mistral4")
        positions = slice(ORIGINAL_CONTEXT if own else None)
        error = (logits - self.expected)[:, positions].abs().max() / self.expected.abs().max()
        return float(error) if error.isfinite() else float("inf")

    def opened(self) -> tuple[ModelConfig, Tensors]:
        """The model's dimensions and weights, from its folder."""
        checkpoint = open_checkpoint(self.folder)
        return without_mtp(checkpoint.config, checkpoint.hugging_face_tensors())


@pytest.fixture(
    scope="module",
    params=[*DENSE_ATTENTION, *(k for k, one in EVALUATED.items() if one not in ARCHITECTURES)],
)
def case(request, tmp_path_factory) -> Case:
    return Case.of(EVALUATED[request.param], tmp_path_factory.mktemp("model") / "hf")


dense_attention = pytest.mark.parametrize("case", DENSE_ATTENTION, indirect=True, scope="module")
sparse_attention = pytest.mark.parametrize("case", SPARSE_ATTENTION, indirect=True, scope="module")


def evaluated(
    config: ModelConfig, tensors: Tensors, tokens: Tensor, attention: str = "absorbed"
) -> Tensor:
    """Logits of a model with these weights, which ``verify`` makes."""
    model = megatron_model(config, attention)
    load_megatron_model(model, config, tensors)
    return megatron_logits(model, tokens)


def stored(folder: Path) -> Tensors:
    """Every tensor of a folder's files, read with nothing of the package."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def text_model(tensors: Tensors) -> Tensors:
    """The tensors of Kimi-K2.5's text model under the names of a DeepSeek-V3."""
    prefix = "language_model."
    return {
        name.removeprefix(prefix).replace("model.blocks.", "model.layers."): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


class TestAgrees:
    @pytest.mark.parametrize("to", ["absorbed", "megatron"])
    def test_distributed_checkpoint(self, case, to):
        """Loaded by Megatron itself, and read by the tool, as ``verify`` does."""
        assert case.error(loaded_logits(case.converted(to), case.tokens), to) < TOLERANCE
        # Of other models test_back_to_transformers reads every bit of this format.
        if to == "megatron" and thinned() and case.architecture not in ARCHITECTURES:
            return
        checkpoint = open_checkpoint(case.converted(to))
        assert case.error(checkpoint_logits(checkpoint, case.tokens), to) < TOLERANCE

    def test_files_per_rank(self, case):
        config, tensors = case.opened()
        ranks = {"tensor_parallel": 2, "pipeline_parallel": 3}
        write_legacy(case.folder.parent / "legacy", config, load_all(tensors), **ranks)
        checkpoint = open_checkpoint(case.folder.parent / "legacy")
        assert case.error(checkpoint_logits(checkpoint, case.tokens), "legacy") < TOLERANCE

    def test_back_to_transformers(self, case, tmp_path):
        """Every bit; transformers reads the folder by itself, with a place for every tensor."""
        before = stored(case.folder)
        if case.architecture in (KIMI_K25, MISTRAL3):
            before = text_model(before)
        for by in ("megatron", "absorbed"):
            shards = TargetOptions(max_shard_bytes=100_000)
            convert(case.converted(by), tmp_path / by, "hf", shards)
            assert len(list((tmp_path / by).glob("*.safetensors"))) > 3
            after = stored(tmp_path / by)
            assert before.keys() == after.keys()
            assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        family = case.architecture.family
        # AutoModelForCausalLM does not know Mistral 4.
        auto = dict.fromkeys(("mistral3", "mistral4"), transformers.Mistral4ForCausalLM)
        loader = auto.get(family, transformers.AutoModelForCausalLM)
        model, report = loader.from_pretrained(
            tmp_path / "absorbed", output_loading_info=True, attn_implementation="eager"
        )
        assert not any(report.values())
        assert case.error(logits_of(model, case.tokens)) < TOLERANCE
        kinds = {"v2": "deepseek_v2", "v32": "deepseek_v32", "glm": "glm4_moe_lite"}
        kinds |= {"glm5": "glm_moe_dsa", "v3": "deepseek_v3", "kimi_k25": "deepseek_v3"}
        kinds |= {"mistral3": "mistral4"}
        assert model.config.model_type == kinds.get(family, family)

    def test_the_folder_itself(self, case):
        logits = checkpoint_logits(open_checkpoint(case.folder), case.tokens)
        assert case.error(logits) < TOLERANCE

    @dense_attention
    def test_tokens_attend_beyond_the_original_context(self, case):
        """Otherwise agreement there would say nothing of a scaled context."""
        assert case.tokens.shape[1] >= 3 * ORIGINAL_CONTEXT
        changed = case.tokens.clone()
        changed[:, :ORIGINAL_CONTEXT] = (changed[:, :ORIGINAL_CONTEXT] + 1) % 128
        model = transformers_model(*case.opened())
        moved = (logits_of(model, changed) - case.expected)[:, 2 * ORIGINAL_CONTEXT :]
        assert moved.abs().max() > WRONG * case.expected.abs().max()


class TestControls:
    """Conversions that are wrong on purpose; each must show."""

    @dense_attention
    def test_rope_taken_for_halves(self, case):
        config, tensors = case.opened()
        wrong = with_half_split_rope(tensors, config)
        assert case.error(evaluated(config, wrong, case.tokens)) > WRONG

    @pytest.mark.parametrize("mscale", [{"mscale_all_dim": 0.0}, {"mscale": 1.5}], ids=str)
    @dense_attention
    def test_wrong_mscale(self, case, mscale):
        config, tensors = case.opened()
        error = case.error(evaluated(with_rope(config, **mscale), tensors, case.tokens))
        # Without YaRN it has no meaning.
        assert error > WRONG if case.architecture.rope == "yarn" else error < TOLERANCE

    @dense_attention
    def test_gate_and_up_swapped(self, case):
        config, tensors = case.opened()
        swapped = dict(tensors)
        for name in tensors:
            if "gate_proj" in name:
                up = name.replace("gate_proj", "up_proj")
                swapped[name], swapped[up] = tensors[up], tensors[name]
        assert case.error(evaluated(config, swapped, case.tokens)) > WRONG

    @sparse_attention
    def test_other_rope_of_the_indexer(self, case):
        """No weight is permuted, and the option is the model's."""
        config, tensors = case.opened()
        model = megatron_model(config, "standard")
        load_megatron_model(model, config, tensors)
        options = model.config
        options.dsa_indexer_rope_interleaved = not options.dsa_indexer_rope_interleaved
        assert case.error(megatron_logits(model, case.tokens)) > WRONG

    @pytest.mark.parametrize("name", ["wq_b.weight", "k_norm.bias", "weights_proj.weight"])
    @sparse_attention
    def test_a_weight_of_the_indexer(self, case, name):
        """One in reverse order."""
        config, tensors = case.opened()
        for key in tensors:
            if key.endswith(f"indexer.{name}"):
                tensors[key] = tensors[key].map(lambda weight: weight.flip(0))
        assert case.error(evaluated(config, tensors, case.tokens, "standard")) > WRONG

    def test_a_selection_of_its_own(self, tmp_path):
        """A layer that shares computes something else than one with an indexer."""
        own = make_model(SPARSE["glm5"], indexer_types=["full"] * 3)
        shared = make_model(SPARSE["glm5"])
        state = {k: v for k, v in own.state_dict().items() if k in shared.state_dict()}
        shared.load_state_dict(state)
        tokens = token_batch()
        folder = save(shared, tmp_path / "hf")
        case = Case(SPARSE["glm5"], folder, tokens, logits_of(shared, tokens))
        assert case.error(logits_of(own, tokens)) > WRONG
        config, tensors = case.opened()
        assert not any("layers.2.self_attn.indexer" in name for name in tensors)
        assert case.error(evaluated(config, tensors, tokens, "standard")) < TOLERANCE


@pytest.fixture
def make_case(tmp_path):
    """A model whose config differs from the usual one of its architecture."""
    return lambda architecture, **changes: Case.of(architecture, tmp_path / "hf", **changes)


class TestOtherModels:
    def test_tied_embeddings(self, make_case):
        case = make_case(V3_DENSE, tie_word_embeddings=True)
        assert case.opened()[0].tied_embeddings
        assert case.error(evaluated(*case.opened(), case.tokens)) < TOLERANCE

    def test_config_of_kimi(self, make_case):
        """Transformers has no such model type; it is a DeepSeek-V3."""
        case = make_case(V3_MOE)
        config, tensors = case.opened()
        fields = {**config.hugging_face, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "x"}}
        kimi = ModelConfig.from_hugging_face(fields)
        logits = logits_of(transformers_model(without_mtp(kimi, {})[0], tensors), case.tokens)
        assert case.error(logits) == 0

    @pytest.mark.parametrize("architecture", [V3_DENSE, *SPARSE_ATTENTION.values()], ids=str)
    def test_fp8(self, make_case, tmp_path, architecture):
        """Transformers gets what the tool has dequantised, Megatron the same."""
        case, to = make_case(architecture), "megatron" if architecture != V3_DENSE else "absorbed"
        convert(case.folder, tmp_path / "fp8", "hf", TargetOptions(fp8="float"))
        convert(tmp_path / "fp8", tmp_path / to, to)
        quantised, converted = (
            checkpoint_logits(open_checkpoint(tmp_path / name), case.tokens) for name in ("fp8", to)
        )
        assert (quantised - converted).abs().max() < TOLERANCE * quantised.abs().max()
        # Rounded weights, and the right scales; of sparse models, random selections decide.
        assert case.error(quantised) > WRONG
        assert case.error(quantised) < 1 or architecture != V3_DENSE

    @pytest.mark.parametrize("change", ["missing", "unknown"])
    def test_weights_that_transformers_has_no_place_for(self, make_case, change):
        """It would warn, and go on with random ones."""
        config, tensors = make_case(V3_DENSE).opened()
        name = "model.layers.1.self_attn.o_proj.weight"
        tensor = tensors.pop(name)
        if change == "unknown":
            tensors.update({name: tensor, "model.layers.1.more.weight": tensor})
            name = "model.layers.1.more.weight"
        with refusal("transformers does not load these weights", name):
            transformers_model(config, tensors)

    def test_mtp_layers_are_not_evaluated(self, tmp_path):
        config = tiny_config(num_nextn_predict_layers=1)
        tensors = random_tensors(config, torch.float32)
        kept = {n: t for n, t in tensors.items() if not n.startswith("model.layers.3.")}
        tokens, logits = token_batch(24) % config.vocab_size, []
        for name, own in (("with", tensors), ("without", kept)):
            folder = write_hugging_face(tmp_path / name, config, own)
            logits.append(checkpoint_logits(open_checkpoint(folder), tokens))
        assert torch.equal(*logits)
        convert(tmp_path / "with", tmp_path / "absorbed", "absorbed")
        absorbed = checkpoint_logits(open_checkpoint(tmp_path / "absorbed"), tokens)
        error = (absorbed - logits[0]).abs().max()
        assert error < TOLERANCE * logits[0].abs().max()


class TestWhatMegatronComputesDifferently:
    """Where the same weights give other logits, the tool says so; the size is shown here."""

    @pytest.mark.parametrize("architecture", [V3_DENSE, OTHERS["minicpm3"]], ids=str)
    def test_epsilon_of_the_latent_norms(self, make_case, architecture):
        """Hugging Face's is 1e-6 whatever rms_norm_eps; so is ours, but not Megatron's."""
        case = make_case(architecture, rms_norm_eps=1e-2)
        config, tensors = case.opened()
        assert case.error(evaluated(config, tensors, case.tokens)) < TOLERANCE
        assert case.error(evaluated(config, tensors, case.tokens, "standard")) > 10 * TOLERANCE
        assert "rms_norm_eps is 0.01" in megatron_notes(config)[0]

    def test_scaling_of_queries(self, make_case):
        case = make_case(OTHERS["mistral4-dense"])
        config, tensors = case.opened()
        assert case.error(evaluated(config, tensors, case.tokens)) < TOLERANCE
        standard = evaluated(config, tensors, case.tokens, "standard")
        assert case.error(standard, "megatron") < TOLERANCE < WRONG < case.error(standard)
        [note] = megatron_notes(config)
        assert "llama_4_scaling_beta is 0.1" in note and f"position {ORIGINAL_CONTEXT}" in note

    @pytest.mark.parametrize("attention", ["absorbed", "standard"])
    @pytest.mark.parametrize(
        ("architecture", "changes"),
        [
            (V2_MOE, {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
            (V3_MOE, {"n_group": 2, "topk_group": 1}),
            (V3_MOE, {"norm_topk_prob": False}),
        ],
        ids=["v2 groups", "v3 groups", "v3 scores not normalised"],
    )
    def test_routing(self, make_case, monkeypatch, architecture, changes, attention):
        """Megatron's own router; both attentions are evaluated with the model's."""
        case = make_case(architecture, num_experts_per_tok=4, **changes)
        config, tensors = case.opened()
        assert any("Megatron's router" in note for note in megatron_notes(config))
        assert case.error(evaluated(config, tensors, case.tokens, attention)) < TOLERANCE
        monkeypatch.setattr(logits, "layer_options", lambda args: {})
        assert case.error(evaluated(config, tensors, case.tokens, attention)) > WRONG

    def test_groups_that_agree(self, make_case):
        """Megatron ranks groups by topk // topk_group experts, as these models do."""
        groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        case = make_case(V2_MOE, num_experts_per_tok=2, **groups)
        config, tensors = case.opened()
        assert not any("Megatron's router" in note for note in megatron_notes(config))
        assert case.error(evaluated(config, tensors, case.tokens)) < TOLERANCE
