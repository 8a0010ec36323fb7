"""Checkpoint conversion between Hugging Face, Megatron and the absorbed model, tensor by tensor.

The command line (``python -m checkpoint_conversion --help``) is the main entrance. In Python:

    checkpoint_conversion.convert.convert(source, target, to, options)
    checkpoint_conversion.inspection.inspect_checkpoint(path)
    checkpoint_conversion.verify.verify(a, b)
    checkpoint_conversion.formats.open_checkpoint(path)

``mapping_table.py`` is the table of names. Importing the package itself loads nothing else.
"""

from checkpoint_conversion.errors import CheckpointError

__version__ = "0.1.0"
__all__ = ["CheckpointError", "__version__"]
