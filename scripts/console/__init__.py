"""What all scripts do alike at their outer edge; nothing here imports torch."""
