"""Tool calls of DeepSeek-V3 and R1, whose arguments are a block of JSON.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Oslo"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from absorbed_mla.serving.server.tool_calls import ToolFormat

ENTRY = ToolFormat(
    name="deepseek_v3",
    summary="DeepSeek-V3 and R1",
    marks=("<｜tool▁calls▁begin｜>", "```json"),
    states={
        "content": {"<｜tool▁calls▁begin｜>": "calls"},
        "calls": {"<｜tool▁call▁begin｜>": "type", "<｜tool▁calls▁end｜>": "content"},
        "type": {"<｜tool▁sep｜>": "name"},
        "name": {"\n```json\n": "arguments"},
        "arguments": {"\n```<｜tool▁call▁end｜>": "calls", "<｜tool▁call▁end｜>": "calls"},
    },
)
