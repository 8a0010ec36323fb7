#!/usr/bin/env python3
"""Pretrain a GPT or hybrid model through Megatron's own loop, ``megatron.training.pretrain``.

Takes Megatron's arguments (``--help`` lists them), two more for the weights to begin with and one
for the class that builds the model. megatron-core's wheel has the loop, its model builders and its
arguments, but no script that calls them; this is one, for mock data. ``--spec`` replaces the layers
of a GPTModel, or of a HybridModel where there is a ``--hybrid-layer-pattern``:

    $ torchrun --nproc-per-node 1 scripts/benchmarks/pretrain_gpt.py \
          --spec specs.absorbed_mla_layer_specs get_absorbed_mla_decoder_block_spec \
          --multi-latent-attention --mock-data --tokenizer-type NullTokenizer ...

Unlike Megatron's own script it compiles nothing: the wheel brings the datasets' helpers compiled.
"""

from __future__ import annotations

import argparse
import re
import sys
import typing
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import kit  # noqa: F401 - it lets a checkout run without being installed

if not hasattr(typing, "override"):
    # Python 3.12's; all else of megatron.training runs on 3.11.
    typing.override = lambda method: method  # type: ignore[attr-defined]

import torch
from torch import Tensor

from absorbed_mla.cpu_host import enable_cpu_host

ON_CPU = enable_cpu_host()
# Neither doubled nor the beginning of a field such as %(default)s.
_BARE_PERCENT = re.compile(r"(?<!%)%(?![%(])")

from megatron.core.datasets import utils as dataset_utils  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import get_args, get_timers, get_tokenizer, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.models.base import ModelConfig  # noqa: E402

from absorbed_mla.checkpoint.hybrid_names import to_hybrid_state_dict  # noqa: E402
from console.parent import end_with_launcher  # noqa: E402


def main() -> None:
    """Build the model's config from Megatron's arguments, and train."""
    end_with_launcher()
    args = parse_and_validate_args(extra_args_provider=_add_arguments)
    model = model_config(args)
    model.pre_wrap_hooks.append(partial(begin_with, args))
    _compile_nothing()
    if ON_CPU:
        _pretend_cuda()
    train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        train_valid_test_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )
    torch.distributed.destroy_process_group()


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="this script's own")
    group.add_argument("--save-first-weights", metavar="FILE", help="written before training")
    group.add_argument(
        "--first-weights", metavar="FILE", help="of another run, with standard or absorbed MLA"
    )
    group.add_argument("--builder", metavar="CLASS", help="in place of Megatron's model builder")
    for action in parser._actions:
        # argparse formats help texts, and one of Megatron's has a percent sign (0.19.2).
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = _BARE_PERCENT.sub("%%", action.help)
    return parser


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Of a HybridModel where Megatron's arguments have a pattern of its layers, else a GPTModel."""
    from_args = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    model = from_args(args)
    if args.builder:
        model.builder = args.builder
    return model


def begin_with(args: argparse.Namespace, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Give the model another run's first weights, or write its own.

    Both attentions, and both models, have the same weights under other names, but draw them in
    another order. A HybridModel begins with the weights of a GPTModel.

    Args:
        args: Megatron's, and ours.
        stages: The model of one pipeline stage, before any wrapping.

    Raises:
        ValueError: If the weights are of another model.
    """
    [model] = stages
    if args.first_weights:
        # Absorbed MLA loads the names of standard MLA.
        weights = torch.load(args.first_weights, map_location="cpu", weights_only=True)
        if args.hybrid_layer_pattern:
            weights = to_hybrid_state_dict(weights)
        found = model.load_state_dict(weights, strict=False)
        # TransformerEngine's state of FP8, which there is none of.
        wrong = [name for part in found for name in part if not name.endswith("_extra_state")]
        if wrong:
            raise ValueError(f"--first-weights are of another model: {', '.join(wrong)}")
    if args.save_first_weights:
        states = model.state_dict().items()
        weights = {k: v for k, v in states if not k.endswith("_extra_state")}
        torch.save(weights, args.save_first_weights)
    return stages


def train_valid_test_datasets(num_samples: list[int], vp_stage: int | None = None):
    """Megatron's mock data: ascending tokens, the same in every run."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=[None, None, None],
        split="1,1,1",
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config)
    return builder.build()


def forward_step(data_iterator, model):
    """The losses of one microbatch [B, S], and what makes one number of them."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = {name: x.cuda(non_blocking=True) for name, x in next(data_iterator).items()}
    timers("batch-generator").stop()
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(sum_losses, batch["loss_mask"])


def sum_losses(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over the tokens, their number, and both for Megatron's log."""
    total = (losses.float() * loss_mask).sum()
    count = loss_mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack((total.detach(), count.float()))}


def _compile_nothing() -> None:
    """Keep Megatron from running ``make``, which the wheel has no Makefile for."""
    from megatron.core.datasets import helpers_cpp  # noqa: F401

    dataset_utils.compile_helpers = lambda: None


def _pretend_cuda() -> None:
    """Let the loop start without a GPU, for tests of this script."""
    from megatron.training import training

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    # What torch's optimizers ask, which a torch for GPUs would believe the two above.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    training.set_jit_fusion_options = lambda **options: None
    training.report_memory = lambda *args, **kwargs: None


if __name__ == "__main__":
    main()
