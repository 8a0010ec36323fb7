"""What ``scripts/serving_board.py`` is made of."""
