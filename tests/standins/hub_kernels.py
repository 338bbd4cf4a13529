# Stands for a release of the `kernels` package that transformers accepts; its kernel is nobody's FlashAttention.
from attend import attend, varlen


def __getattr__(name):  # the classes transformers imports and does not use here
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def use_kernel_forward_from_hub(*args, **kwargs):
    return lambda cls: cls


def use_kernel_func_from_hub(*args, **kwargs):
    return lambda function: function


class Kernel:
    @staticmethod
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        return attend(q, k, v, causal, softmax_scale)

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
    ):
        return varlen(q, k, v, cu_seqlens_q, causal, softmax_scale)


def get_kernel(*args, **kwargs):
    return Kernel
