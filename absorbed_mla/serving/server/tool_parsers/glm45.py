"""Tool calls of GLM-4.5 and later ones, whose arguments stand one by one; some without line ends.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
"""

from __future__ import annotations

from absorbed_mla.serving.server.tool_calls import ToolFormat

ENTRY = ToolFormat(
    name="glm45",
    summary="GLM-4.5 and later",
    marks=("<arg_key>",),
    states={
        "content": {"<tool_call>": "name"},
        "name": {"\n": "parameters", "<arg_key>": "key", "</tool_call>": "content"},
        "parameters": {"<arg_key>": "key", "<arg_value>": "value", "</tool_call>": "content"},
        "key": {"</arg_key>": "parameters"},
        "value": {"</arg_value>": "parameters"},
    },
)
