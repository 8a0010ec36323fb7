"""flash_attn.cute.interface of flash-attn-4, as far as it is used."""

from tests.support.fake_packages import kit

NAME = "flash_attn.cute.interface"


class Interface:
    """Its two functions; tensors are [B, S, N, D], or [S, N, D] with boundaries of sequences."""

    def __init__(self) -> None:
        self.calls = 0
        self.deterministic: set[bool] = set()

    def _flash_attn_fwd(self, q, k, v, *, softmax_scale, causal, out, lse, **lengths):
        self.calls += 1
        assert lse.is_contiguous() and all(x.stride(-1) == 1 for x in (q, k, v, out))
        for queries, keys in _sequences(lengths):
            rows, columns, offset = _views(q, k, queries, keys, causal)
            found = kit.attend(q[rows], k[columns], v[columns], softmax_scale, offset)
            out[rows], lse[..., queries] = (x.to(to) for x, to in zip(found, (out, lse)))

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic, dlse, dq, dk, dv,
        **lengths,
    ):  # fmt: skip
        self.calls += 1
        self.deterministic.add(deterministic)
        assert lse.is_contiguous() and (dlse is None or dlse.shape == lse.shape)
        for queries, keys in _sequences(lengths):
            rows, columns, offset = _views(q, k, queries, keys, causal)
            given = (q[rows], k[columns], v[columns], out[rows], lse[..., queries], dout[rows])
            grad_lse = None if dlse is None else dlse[..., queries]
            found = kit.gradients(*given, softmax_scale, offset, grad_lse)
            dq[rows], dk[columns], dv[columns] = (x.to(dq) for x in found)


def _sequences(lengths) -> list[tuple[slice, slice]]:
    if not lengths:
        return [(slice(None), slice(None))]
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    bounds = [lengths[name] for name in names]
    longest = [lengths["max_seqlen_q"], lengths["max_seqlen_k"]]
    assert longest == [int(x.max()) for x in bounds[2:]]
    return kit.sequences(*bounds)


def _views(q, k, queries: slice, keys: slice, causal: bool):
    """Indices of a sequence's rows; causal is aligned at the bottom right."""
    rows, columns = ((..., part, slice(None), slice(None)) for part in (queries, keys))
    return rows, columns, k[columns].shape[-3] - q[rows].shape[-3] if causal else None


def install(monkeypatch) -> Interface:
    """In place of the package, whether or not there is one."""
    interface = Interface()
    kit.install(monkeypatch, NAME, interface)
    return interface
