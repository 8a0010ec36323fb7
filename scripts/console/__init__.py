"""Command line, errors, exit codes and output checks of all scripts; nothing imports torch."""
