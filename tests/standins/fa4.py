# Stands for flash_attn.cute of FlashAttention-4: the fourth parameter is qv; always returns (out, lse).
from attend import CALLS, attend, seen, varlen  # noqa: F401


def flash_attn_func(
    q, k, v, qv=None, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0, deterministic=False
):
    seen("flash_attn_func", q, k, causal=causal, softmax_scale=softmax_scale, deterministic=deterministic)
    return attend(q, k, v, causal, softmax_scale), None


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    softmax_scale=None, causal=False
):  # fmt: skip
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    seen("flash_attn_varlen_func", q, k, causal=causal, softmax_scale=softmax_scale, **offsets, **longest)
    return varlen(q, k, v, cu_seqlens_q, causal, softmax_scale), None
