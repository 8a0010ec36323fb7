"""The parsers of one server: what takes tool calls and reasoning out of its model's texts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from absorbed_mla.registry import TOOL_PARSERS
from absorbed_mla.serving.server.reasoning import REASONING_PARSERS, ReasoningFormat
from absorbed_mla.serving.server.tool_calls import ToolFormat

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutputParsers:
    """Formats of a model's texts.

    Attributes:
        tools: Of tool calls; None: they cannot be found.
        reasoning: Of what it thinks; None: that is left in the text.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def chosen(
        cls, tool_call_parser: str, reasoning_parser: str | None, template: str
    ) -> OutputParsers:
        """Those that options name.

        Args:
            tool_call_parser: A name, or ``"auto"`` for the one of the chat template, which is
                logged.
            reasoning_parser: A name or None.
            template: Text of the model's chat template.
        """
        found, _ = TOOL_PARSERS.examine(tool_call_parser, template)
        tools = found[0] if found else None
        if tool_call_parser != "auto":
            tools = TOOL_PARSERS[tool_call_parser]
        elif tools is None:
            _logger.info("tool_call_parser: none, because the chat template has no marks of one")
        else:
            marks = " and ".join(tools.marks)
            _logger.info("tool_call_parser: %s, because the template has %s", tools.name, marks)
        reasoning = REASONING_PARSERS[reasoning_parser] if reasoning_parser else None
        return cls(tools, reasoning)

    def require_tools(self) -> ToolFormat:
        """The format of tool calls.

        Raises:
            ValueError: If there is none.
        """
        if self.tools is None:
            raise ValueError(
                "tools need the server's option tool_call_parser, one of "
                f"{', '.join(TOOL_PARSERS.names())}: the model's chat template has the marks of "
                "none of them"
            )
        return self.tools
