"""A checkpoint to be read, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoint_conversion.checkpoint_folder import file_inside


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is and how it is read; functions take all but the first as keywords.

    Attributes:
        path: Its folder; for Megatron's, that of all iterations or of one of them.
        hf_config: A config.json for a Megatron checkpoint, which overrides the checkpoint's own.
        follow_links: Whether links may lead out of the folder.
        drop_tokens: Whether a Megatron checkpoint may lose rows of its embedding that are tokens by
            what it says of itself, because ``hf_config`` has fewer.
    """

    path: Path
    hf_config: Path | None = None
    follow_links: bool = False
    drop_tokens: bool = False

    def file(self, path: Path) -> Path:
        """The regular file at a path below the folder; see :func:`file_inside`."""
        name = path.relative_to(self.path).as_posix()
        return file_inside(self.path, name, follow_links=self.follow_links)
