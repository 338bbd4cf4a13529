# Stands for flash_attn_interface.py of FlashAttention-3: the parameters transformers looks for; returns a tensor.
from attend import CALLS, attend, seen, varlen  # noqa: F401


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), softcap=0.0, deterministic=False
):
    seen("flash_attn_func", q, k, causal=causal, softmax_scale=softmax_scale, deterministic=deterministic)
    return attend(q, k, v, causal, softmax_scale)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
):  # fmt: skip
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    seen("flash_attn_varlen_func", q, k, causal=causal, softmax_scale=softmax_scale, **offsets, **longest)
    return varlen(q, k, v, cu_seqlens_q, causal, softmax_scale)


def flash_attn_with_kvcache(*args, **kwargs):
    raise NotImplementedError
