"""However many process groups there are, their sockets have one device, which is one thread."""

import torch
import torch.distributed as dist

from tests.support import needs


@needs.no_gpu
def test_groups_share_a_device():
    groups = [dist.new_group([0]) for _ in range(2)]
    devices = []
    for group in groups:
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [1, 1]
        devices += group._get_backend(x.device).options._devices
        dist.destroy_process_group(group)
    assert len(devices) == 2 and devices[0] is devices[1]
