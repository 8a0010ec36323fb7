"""The backend ``cudnn`` with cuDNN's calls for one dense block replaced."""

from absorbed_mla.core_attention.backends.cudnn import CudnnBackend
from tests.support.fake_packages import kit


class PlainCudnn(CudnnBackend):
    """Tensors are [S, B, N, D], the LSE [S, B, N]; backward is from the LSE it is given."""

    def dense_forward(self, q, k, v, causal, scale):
        batch_first = (x.transpose(0, 1) for x in (q, k, v))
        out, lse = kit.attend(*batch_first, scale, 0 if causal else None)
        return out.transpose(0, 1), lse.permute(2, 0, 1)

    def dense_backward(self, grad_out, q, k, v, out, lse, causal, scale):
        q, k, v, out, grad_out = (x.transpose(0, 1) for x in (q, k, v, out, grad_out))
        rows = (q, k, v, out, lse.permute(1, 2, 0), grad_out)
        found = kit.gradients(*rows, scale, 0 if causal else None)
        return tuple(x.transpose(0, 1) for x in found)
