"""Tool calls of Kimi-K2, which names calls itself.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from absorbed_mla.serving.server.tool_calls import ToolFormat, new_call_id


def id_and_name(header: str) -> tuple[str, str]:
    """``functions.get_weather:0`` is the id of a call of ``get_weather``."""
    name, _, number = header.rpartition(":")
    if not name or not number.isdecimal():
        name, header = header, new_call_id()
    return header, name.removeprefix("functions.")


ENTRY = ToolFormat(
    name="kimi_k2",
    summary="Kimi-K2",
    marks=("<|tool_calls_section_begin|>",),
    id_and_name=id_and_name,
    states={
        "content": {"<|tool_calls_section_begin|>": "calls"},
        "calls": {"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": "content"},
        "name": {"<|tool_call_argument_begin|>": "arguments"},
        "arguments": {"<|tool_call_end|>": "calls"},
    },
)
