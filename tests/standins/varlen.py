# Stands for torch.nn.attention.varlen.varlen_attn, which runs on a GPU only: its parameters, SDPA inside.
from attend import CALLS, seen, varlen  # noqa: F401


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):  # fmt: skip
    assert enable_gqa or query.shape[1] == key.shape[1]
    offsets = {"cu_seqlens_q": cu_seq_q, "cu_seqlens_k": cu_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    seen("varlen_attn", query, key, causal=window_size == (-1, 0), softmax_scale=scale, window=window_size, **offsets)
    return varlen(query, key, value, cu_seq_q, window_size == (-1, 0), scale)
