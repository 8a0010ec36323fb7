"""Tool calls of DeepSeek-V3.1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from absorbed_mla.serving.server.tool_calls import ToolFormat

ENTRY = ToolFormat(
    name="deepseek_v31",
    summary="DeepSeek-V3.1",
    marks=("<｜tool▁calls▁begin｜>",),
    not_marks=("```json",),
    states={
        "content": {"<｜tool▁calls▁begin｜>": "calls"},
        "calls": {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"},
        "name": {"<｜tool▁sep｜>": "arguments"},
        "arguments": {"<｜tool▁call▁end｜>": "calls"},
    },
)
