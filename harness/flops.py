"""Model FLOPs of a training step from a Hugging Face config, under one convention. No torch.

    from harness import flops
    c = flops.count(flops.shape("llama-3.1-8b"), seq_len=131072)
    c.attention_tflop, c.dense_tflop, c.total_tflop, c.attention_share     # 13510.8 5901.9 19412.7 0.696

Forward and backward of one micro-batch, in TFLOP (a count, not a rate). A multiply-add is two FLOPs, the backward
is twice the forward:

    dense      6 * N * tokens             N = weights of every matmul a token really goes through: all layers, the
                                          chosen and the shared experts, the router, and lm_head once, tied or not.
                                          Looking up an embedding is free.
    attention  12 * pairs * head_dim * heads, per layer, where pairs is the area the query-key mask leaves:
               causal over n tokens       n^2 / 2                    (so 6 * s^2 * head_dim * heads * layers in all)
               window of w < n tokens     n^2 / 2 - (n - w)^2 / 2    (= n*w - w^2 / 2)
               packed documents, chunks   the sum over the documents, over the chunks
               where queries and values differ in head_dim (latent attention), their mean counts

Recomputation (activation checkpointing) is not counted: this is what MFU needs, not HFU. The area of the triangle
leaves out half of the diagonal, one part in s, as the published figures do. A model type is counted only if
harness/architectures.toml has it, and tests/test_architectures.py holds each one against torch's FlopCounterMode.
left_out() names what of a model is not counted.
"""

import copy
import tomllib
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from harness import architectures
from harness.architectures import Uncountable

CONVENTION = (
    "causal model FLOPs: 6*N*tokens + 6*s^2*head_dim*heads*layers, N with lm_head once and active experts only, "
    "embedding look-up free, windows and packed documents by area, recompute not counted"
)

_SHIPPED: dict[str, dict] = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Count:
    """TFLOP (10^12 operations) of forward and backward of one micro-batch."""

    attention_tflop: float
    dense_tflop: float

    @property
    def total_tflop(self) -> float:
        return self.attention_tflop + self.dense_tflop

    @property
    def attention_share(self) -> float:
        """Of the total, 0..1."""
        return self.attention_tflop / self.total_tflop


def count(config: dict, seq_len: int, batch_size: int = 1, doc_len: int | None = None) -> Count:
    """Forward + backward of `batch_size` sequences of `seq_len` tokens of the model `config` describes.

    With `doc_len` each sequence is packed documents of that many tokens, the last one shorter when it does not
    divide. Raises Uncountable for a model that cannot be counted and for a length that is not a positive number.
    """
    model, positive = architectures.read(config), architectures.positive
    batch_size, seq_len = positive(batch_size, "batch_size"), positive(seq_len, "seq_len")
    doc_len = seq_len if doc_len is None else min(positive(doc_len, "doc_len"), seq_len)
    twice_pairs = 0
    for (kind, tokens), layers in Counter(model.reach).items():
        for n, times in _stretches(seq_len, doc_len, tokens if kind == "chunk" else seq_len).items():
            cut = max(0, n - tokens) ** 2 if kind == "window" else 0
            twice_pairs += layers * times * (n**2 - cut)
    return Count(
        attention_tflop=3 * twice_pairs * model.width * batch_size / 1e12,
        dense_tflop=6 * (model.active + model.table) * seq_len * batch_size / 1e12,
    )


def _stretches(seq_len: int, doc_len: int, chunk: int) -> Counter[int]:
    """Lengths of what lies between the ends of documents and of chunks, each with how often there is one."""
    if chunk >= seq_len:
        return Counter({doc_len: seq_len // doc_len}) + Counter({seq_len % doc_len: 1})
    ends = sorted({*range(0, seq_len, doc_len), *range(0, seq_len, chunk), seq_len})
    return Counter(b - a for a, b in pairwise(ends))


def step_work(run, seq_len: int, doc_len: int | None = None) -> Count | None:
    """One GPU's share of a step of `run` (a records.Run), all accumulated micro-batches; None: it cannot be counted.

    doc_len overrides the recipe's: documents of that many tokens packed into the sequence.
    """
    if run.model is None or not (run.recipe or run.job) or run.model.uncounted or seq_len is None:
        return None
    batch, packed = (run.recipe.batch_size, run.recipe.doc_len) if run.recipe else (1, None)
    try:
        one = count(run.model.config, seq_len, batch, doc_len or packed)
    except Uncountable:
        return None
    if run.recipe:
        share = run.recipe.grad_accum / run.recipe.sp_size
    elif tokens := step_tokens(run, seq_len):
        share = tokens / seq_len
    else:
        return None
    return Count(one.attention_tflop * share, one.dense_tflop * share)


def step_tokens(run, seq_len: int | None) -> float | None:
    """Tokens one GPU trains on in a step: seqlen x batch x accumulation, shared by the GPUs of one sequence.

    None: the log the run is from does not say."""
    recipe = run.recipe
    if run.job:
        job = run.job
        tokens = job.tokens_per_step or (job.global_batch and seq_len and job.global_batch * seq_len)
        return tokens / run.world_size if tokens and run.world_size else None
    return seq_len * recipe.batch_size * recipe.grad_accum / recipe.sp_size if recipe else float(seq_len)


def parameters(config: dict) -> int:
    """Matrix weights held: all experts, the embedding, and lm_head unless tied. To estimate memory before a model is
    built: norms, biases and learned positions, well under 1 %, are left out, and what left_out() names. Raises
    Uncountable."""
    model = architectures.read(config)
    if model.tied is None:
        raise Uncountable("config has no tie_word_embeddings: the number of parameters depends on it")
    return model.held + model.table * (1 if model.tied else 2)


def left_out(config: dict) -> list[str]:
    """Parts the config names that count() and parameters() leave out: vision towers, multi-token prediction layers.
    Raises Uncountable."""
    return architectures.read(config).left_out


def shapes() -> list[str]:
    """Names of the shipped model shapes (models.toml)."""
    return list(_SHIPPED)


def shape(name: str) -> dict:
    """A shipped model's Hugging Face config, a fresh copy; raises KeyError naming the ones there are."""
    if name not in _SHIPPED:
        raise KeyError(f"no shipped model shape {name!r}; there are: {', '.join(shapes())}")
    return copy.deepcopy({key: value for key, value in _SHIPPED[name].items() if key != "hub_id"})


def hub_id(name: str) -> str | None:
    """Where the Hugging Face hub has a shipped shape's real weights; None where there are none."""
    return _SHIPPED.get(name, {}).get("hub_id")
