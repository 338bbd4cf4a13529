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


@dataclass(frozen=True)
class Fleet:
    """The question: a job known to take base_days on the base crew of old GPUs; `old` or `new` instead?

    scaling is the share of linear speedup a crew with more workers than the base keeps (1 = all of it). speedup is
    one new worker's rate over one old worker's, where it was measured; peak_ratios are the specifications'.
    """

    base: Crew
    base_days: float
    old: Crew
    new: Crew
    price_ratio: float
    peak_ratios: dict[str, float]
    scaling: float = 1.0
    speedup: Ratio | None = None

    def rate(self, crew: Crew) -> float:
        """Old-GPU rate of a crew, in units of the base crew's."""
        linear = crew.workers / self.base.workers
        return linear * self.scaling if linear > 1 else linear

    def row(self, name: str, crew: Crew, price: float = 1.0, speed: float = 1.0) -> dict:
        days = self.base_days / (self.rate(crew) * speed)
        row = {"fleet": name, "gpus": crew.gpus, "workers": crew.workers, "days": days}
        return row | {"cost": days * crew.gpus * price}

    def answer(self) -> dict:
        """Days and cost (in old GPU-days) of each fleet, and the speedups per worker at which the new one breaks even.

        equal_time: as fast as the `old` fleet. equal_spend: the job costs the same on both (rent). equal_purchase: as
        fast as the old GPUs that the price of the new ones would buy (as many helpers as `old` has).
        """
        bought = self.new.gpus * self.price_ratio
        same_money = Crew(max(bought - self.old.helpers, 0), self.old.helpers)
        rows = [self.row("old, as now", self.base), self.row("old", self.old)]
        if same_money.workers:
            rows.append(self.row("old, for the price of the new", same_money))
        speeds = {f"new, at the {name} ratio {r:.2f}": r for name, r in self.peak_ratios.items()}
        if self.speedup:
            speeds[f"new, at the measured {self.speedup.value:.2f}"] = self.speedup.value
        rows += [self.row(name, self.new, self.price_ratio, speed) for name, speed in speeds.items()]
        need = {"equal_time": self.rate(self.old) / self.rate(self.new)}
        need["equal_spend"] = need["equal_time"] * bought / self.old.gpus
        need["equal_purchase"] = self.rate(same_money) / self.rate(self.new)
        told = {"base": str(self.base), "old": str(self.old), "new": str(self.new), "price_ratio": self.price_ratio}
        told |= {"scaling": self.scaling, "old_gpus_for_the_price": bought, "rows": rows, "needed": need}
        return told | {"measured_speedup": self.speedup and asdict(self.speedup), "peak_ratios": self.peak_ratios}


def positive(text: str) -> float:
    """A finite number above zero, from the command line. Raises ValueError with the text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f'"{text}" is not a number above zero')
    return value
