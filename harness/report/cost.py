"""Money and time: what a million tokens cost, at which price ratio an upgrade breaks even, what a fleet needs.

Prices are per GPU and hour, in any currency; with only a ratio known, in the price of one old GPU-hour.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass

from harness.stats import Ratio

# A cost difference under 2 % does not decide a purchase (a price moves more in a week, and the published figures are
# rounded to 1 in 141): called break-even, whether or not an interval tells it from zero.
TOLERANCE = 0.02

WINS, EVEN, LOSES = "wins", "break-even", "loses"


def per_mtoken(price_per_hour: float, tokens_per_s: float) -> float:
    """Cost of 1e6 tokens on a GPU (or on n of them, with n times the price and the rate)."""
    return price_per_hour / (tokens_per_s * 3600) * 1e6


def hours(tokens: float, tokens_per_s_per_gpu: float, gpu_count: float) -> float:
    """Wall-clock hours of a job of that many tokens."""
    return tokens / (tokens_per_s_per_gpu * gpu_count) / 3600


def outcome(speedup: Ratio, price_ratio: float) -> str:
    """wins, break-even or loses, per token. Break-even: within 2 %, or the interval spans the price ratio."""
    spans = speedup.low is not None and speedup.high is not None and speedup.low <= price_ratio <= speedup.high
    if spans or abs(speedup.value / price_ratio - 1) <= TOLERANCE:
        return EVEN
    return WINS if speedup.value > price_ratio else LOSES


@dataclass(frozen=True)
class Crew:
    """GPUs that work, and GPUs that only feed them and add no throughput: "7+1", or "8"."""

    workers: float
    helpers: float = 0

    @property
    def gpus(self) -> float:
        return self.workers + self.helpers

    def __str__(self) -> str:
        return f"{self.workers:g}+{self.helpers:g}" if self.helpers else f"{self.workers:g}"


def parse_crew(text: str) -> Crew:
    """Raises ValueError when the text is not WORKERS or WORKERS+HELPERS with at least one worker."""
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", text.strip())
    if not match or int(match[1]) < 1:
        raise ValueError(f'"{text}" is not a fleet: write WORKERS or WORKERS+HELPERS, such as 8 or 7+1')
    return Crew(int(match[1]), int(match[2] or 0))


def fleet(
    base: Crew, base_days: float, old: Crew, new: Crew, price_ratio: float, peak_ratios: dict[str, float],
    scaling: float = 1.0, speedup: Ratio | None = None,
) -> dict:  # fmt: skip
    """A job known to take base_days on the base crew of old GPUs: days and cost (in old GPU-days) on `old` and `new`.

    scaling is the share of linear speedup a crew with more workers than the base keeps (1 = all of it). speedup is
    one new worker's rate over one old worker's, where it was measured; peak_ratios are the specifications'.
    needed: speedups per worker at which `new` breaks even. equal_time: as fast as `old`. equal_spend: the job costs the
    same (rent). equal_purchase: as fast as the old GPUs for the price of the new (as many helpers as `old` has).
    """

    def rate(crew: Crew) -> float:  # 1 is the base crew's
        linear = crew.workers / base.workers
        return linear * scaling if linear > 1 else linear

    def row(name: str, crew: Crew, price: float = 1.0, speed: float = 1.0) -> dict:
        days = base_days / (rate(crew) * speed)
        counts = {"fleet": name, "gpus": crew.gpus, "workers": crew.workers}
        return counts | {"days": days, "cost": days * crew.gpus * price}

    bought = new.gpus * price_ratio
    same_money = Crew(max(bought - old.helpers, 0), old.helpers)
    rows = [row("old, as now", base), row("old", old)]
    if same_money.workers:
        rows.append(row("old, for the price of the new", same_money))
    rows += [row(f"new, at the {name} ratio {r:.2f}", new, price_ratio, r) for name, r in peak_ratios.items()]
    if speedup:
        rows.append(row(f"new, at the measured {speedup.value:.2f}", new, price_ratio, speedup.value))
    time = rate(old) / rate(new)
    needed = {"equal_time": time, "equal_spend": time * bought / old.gpus}
    needed["equal_purchase"] = rate(same_money) / rate(new)
    told = {"base": str(base), "old": str(old), "new": str(new), "price_ratio": price_ratio, "scaling": scaling}
    told |= {"old_gpus_for_the_price": bought, "rows": rows, "needed": needed, "peak_ratios": peak_ratios}
    return told | {"measured_speedup": speedup and asdict(speedup)}


def positive(text: str, kind: type = float, most: float = math.inf) -> float:
    """A finite number above zero (kind=int: a whole one), from the command line. Raises ValueError with the text."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= most and math.isfinite(value)):
        limit = f", at most {most:g}" if most < math.inf else ""
        raise ValueError(f'"{text}" is not a {"whole " if kind is int else ""}number above zero{limit}')
    return value
