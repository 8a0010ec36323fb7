"""The decode kernel for Hopper while another process has the GPU in turns, as nothing else may."""

import torch

from tests.support.paged import fp8_inputs
from tests.support.shared_gpu import shared_gpu
from tests.unit.kernels.paged import DEVICE
from tests.unit.kernels.test_paged_hopper import attend
from tests.unit.kernels.test_paged_hopper_gpu import PIECES, one_by_one, over, repeated


@over
def test_pieces_where_processes_share_the_gpu(fp8):
    """They have it in turns, amid a kernel, and what its programs had in shared memory comes back.

    Barriers that nothing used did harm there (``new_barriers``), in one of 4,000 tiles.
    """
    inputs = fp8_inputs(PIECES, DEVICE) if fp8 else PIECES.inputs(DEVICE)
    expected = one_by_one(inputs, PIECES)
    many = repeated(inputs, PIECES, 40)
    attend(many, batch_invariant=True)  # which compiles it
    wrong = 0
    with shared_gpu():
        for _ in range(60):
            for x, y in zip(attend(many, batch_invariant=True), expected):
                # As integers: one that is NaN is wrong, too.
                bits = torch.int16 if x.element_size() == 2 else torch.int32
                wrong += (x.view(bits).view(-1, *y.shape) != y.view(bits)).sum()
        wrong = int(wrong)
    assert wrong == 0
