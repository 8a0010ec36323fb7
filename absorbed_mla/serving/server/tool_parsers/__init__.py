"""Formats of tool calls, one file each; a file's name is that of vLLM's ``--tool-call-parser``."""
