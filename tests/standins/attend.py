"""Causal attention in FlashAttention's layout, and a list of the calls that were made."""

import torch
import torch.nn.functional as F

CALLS = []


def attend(q, k, v, causal, scale):
    """(batch, tokens, heads, head_dim) in and out."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2)


def varlen(q, k, v, cu_seqlens, causal, scale):
    """(tokens of all documents, heads, head_dim) in and out."""
    ends = cu_seqlens.tolist()
    parts = [attend(*(t[None, a:b] for t in (q, k, v)), causal, scale)[0] for a, b in zip(ends, ends[1:], strict=False)]
    return torch.cat(parts)


def seen(function, q, k, **arguments):
    """Notes the call: shapes, and for each argument its type, dtype and value."""
    tensors = {n: [type(a).__name__, str(a.dtype), a.tolist()] for n, a in arguments.items() if torch.is_tensor(a)}
    others = {n: [type(a).__name__, None, a] for n, a in arguments.items() if not torch.is_tensor(a)}
    CALLS.append({"function": function, "q": list(q.shape), "k": list(k.shape), "arguments": tensors | others})
