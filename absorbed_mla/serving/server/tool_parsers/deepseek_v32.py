"""Tool calls of DeepSeek-V3.2, whose arguments stand one by one.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

from absorbed_mla.serving.server.tool_calls import ToolFormat

_END = {"</｜DSML｜parameter>": "parameters"}

ENTRY = ToolFormat(
    name="deepseek_v32",
    summary="DeepSeek-V3.2",
    marks=("｜DSML｜",),
    states={
        "content": {"<｜DSML｜function_calls>": "calls"},
        "calls": {'<｜DSML｜invoke name="': "name", "</｜DSML｜function_calls>": "content"},
        "name": {'">': "parameters"},
        "parameters": {'<｜DSML｜parameter name="': "key", "</｜DSML｜invoke>": "calls"},
        "key": {'" string="true">': "text", '" string="false">': "json"},
        "text": _END,
        "json": _END,
    },
)
