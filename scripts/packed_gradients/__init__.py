"""The parts of scripts/check_cudnn_packed_gradients.py."""
