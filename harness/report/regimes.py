"""Which kind of context a length is: by attention's share of the model FLOPs, because that is what moves a speedup.

Over two thirds is long context, under one third is short (or packed: documents attend only within themselves), mixed
lies between. For an 8B model that is about 110k and 28k tokens.
"""

from __future__ import annotations

from harness import records

LONG_SHARE, SHORT_SHARE = 2 / 3, 1 / 3
NAMES = {
    "long": "Long context, one document a sequence",
    "mixed": "In between",
    "short": "Short or packed",
    "unknown": "All lengths (the model's FLOPs are not known)",
}


def regime(attention_share: float | None) -> str:
    """A key of NAMES; unknown without FLOPs."""
    if attention_share is None:
        return "unknown"
    return "long" if attention_share > LONG_SHARE else "short" if attention_share < SHORT_SHARE else "mixed"


def heavy(recipe: records.Recipe | None) -> bool:
    """A recipe made for long context: at short lengths its host optimizer and recompute are most of the step."""
    return bool(recipe and recipe.offload_optimizer and recipe.grad_checkpoint)
