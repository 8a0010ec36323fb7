"""Grouped-GEMM experts for inference, without synchronising the CPU with the GPU.

Megatron's experts run one after the other, or need the number of each expert's tokens on the host.
Here the products of all experts are one operator, over rows whose number is that of tokens times
chosen experts, so nothing waits for the device, and CUDA graphs hold the layer as it is. In parity
mode (``absorbed_mla.batch_invariant``) they have the bits of Megatron's.
"""

from __future__ import annotations
