"""What Megatron's own command line makes of words: JSON in, JSON out, in a process of its own.

``megatron.training`` needs ``typing.override`` of Python 3.12, and changes much on import.
"""

import argparse
import dataclasses
import json
import sys
import typing

if not hasattr(typing, "override"):
    typing.override = lambda function: function  # type: ignore[attr-defined]

from absorbed_mla.cpu_host import enable_cpu_host

enable_cpu_host()

from megatron.core.transformer import MLATransformerConfig  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

_PLAIN = (str, int, float, list)


def parsed(words: list[str]) -> dict[str, object]:
    """Every argument of Megatron's, of which the words may not hold an unknown one."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    return vars(parser.parse_args(words))


def main() -> None:
    """Parse each line of words on stdin."""
    fields = [field.name for field in dataclasses.fields(MLATransformerConfig)]
    answers = [parsed(words) for words in json.load(sys.stdin)]
    known = [
        {name: value for name, value in answer.items() if isinstance(value, _PLAIN)}
        for answer in answers
    ]
    print(json.dumps({"fields": fields, "parsed": known}))


if __name__ == "__main__":
    main()
