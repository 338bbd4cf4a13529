"""The verdicts: one sentence per regime, with the figure that decides it and what would change it.

Only lengths measured on both boxes count. Each function takes the dict of decision.decide, as far as it is built.
"""

from __future__ import annotations

from harness.report import cost
from harness.report.regimes import NAMES, regime
from harness.stats import Ratio


def verdicts(result: dict, old: str, new: str) -> list[dict]:
    """Of a complete result: what is not equal, a need that decides, then a sentence per regime."""
    c, found = result["comparable"], []
    if not c["ok"]:
        text = f"{old} and {new} differ in {'; '.join(c['differences'])}: what follows compares that too."
        found.append(_verdict("comparability", None, text, None, "an equal stack, model and recipe on both boxes"))
    found += [_need(answer, old, new) for answer in result["gate"]["needs"] if answer["decides"] != "no"]
    evidence = {name: _evidence(name, result) for name in NAMES}
    own = result.get("documents", {}).get("regime")
    for name, (ratios, basis) in evidence.items():
        if ratios:
            row = _regime(name, ratios, basis, result, old, new)
        elif name in ("long", "short") and not evidence["unknown"][0]:
            share = "over two thirds" if name == "long" else "under one third"
            row = _verdict(name, None, f"{NAMES[name]}: no common length has attention {share} of the FLOPs.", None,
                           "measuring one")  # fmt: skip
        else:
            continue
        found.append(row | {"yours": own == name})
    return found


def renting(projection: dict, price: float | None, target: str) -> dict:
    """Whether a box of the target is worth renting to measure; a projection never decides a purchase."""
    steps, advice, sides = projection["steps"], projection["advice"], projection["break_even"]
    low, high = min(s["low"] for s in steps), max(s["high"] for s in steps)
    reach = f"{target} is projected at {between(low, high)} the speed"
    if price is None:
        sentence, change = f"{reach}; whether renting one pays depends on its price.", "--price-ratio"
    elif advice == "not worth renting":
        sentence = f"Not worth renting: {reach}, and even the best of it is below {price:.2f}x the price."
        change = f"a price ratio under {high:.2f}"
    elif advice == "rent":
        sentence = f"Rent one and measure: {reach} for {price:.2f}x the price; break-even lies inside the range"
        change = "the measurement, which alone tells the side of break-even"
    else:
        sentence = f"Likely a buy, rent one to confirm: {reach} for {price:.2f}x the price; it pays even at the low end"
        change = f"a price ratio over {min(s['low'] for s in steps if s['label'] in sides['over']):.2f}"
    if advice in ("rent", "likely buy"):
        others = (("under", "it loses even at the high end"), ("over", "it pays even at the low end"))
        rest = [
            f"; {text} at {', '.join(sides[k])}"
            for k, text in others
            if sides[k] and (advice, k) != ("likely buy", "over")
        ]
        sentence += f" at {', '.join(sides['around'] or sides['over'])}{''.join(rest)}."
    decided_by = {"figure": "projected speedup", "low": low, "high": high, "price_ratio": price}
    return _verdict("renting", advice, sentence, decided_by, change)


def ratio(speedup: dict) -> Ratio:
    return Ratio(speedup["value"], speedup["low"], speedup["high"])


def _verdict(about: str, outcome: str | None, sentence: str, decided_by: dict | None, change: str) -> dict:
    return {"about": about, "outcome": outcome, "sentence": sentence, "decided_by": decided_by, "change": change}


def _need(answer: dict, old: str, new: str) -> dict:
    need, stack = answer["need"], answer["new_stack"]
    sentence, change = {
        "upgrade": (f"{old} cannot do it at all and {new} can ({stack}); speed does not decide this.",
                    f"doing without {need}, or spreading over more old GPUs where it is memory"),
        "beware": (f"only {new}'s silicon can, but its software: {stack}. Do not pay for it yet.",
                   "bench_ceilings.py running it on the new box"),
        "neither": (f"neither {old} nor {new} can do it.", "another GPU, or more parallelism where it is memory"),
    }[answer["decides"]]  # fmt: skip
    return _verdict("need", answer["decides"], f"You need {need}: {sentence}", {"figure": need, "stack": stack}, change)


def _evidence(name: str, result: dict) -> tuple[dict[int, Ratio], str]:
    """Speedup per length of a regime, and what it was measured on. Short context wants a recipe made for it."""
    sweeps = [(s["heavy_recipe"], s["points"], "measured") for s in result["speed"]["others"]]
    sweeps.insert(0, (result["comparable"]["heavy_recipe"], result["speed"]["points"], "measured"))
    if name != "short":
        return _ratios(name, sweeps[0][1]), "measured"
    steps = [b | {"speedup": {"value": b["speedup"], "low": None, "high": None}} for b in result["speed"]["buckets"]]
    basis = "the decomposed step, without offload or recompute"
    for heavy, points, source in [*sweeps, *((s["heavy_recipe"], [s], basis) for s in steps)]:
        if not heavy and (ratios := _ratios(name, points)):
            return ratios, source
    return _ratios(name, sweeps[0][1]), "measured in a recipe made for long context, so not representative"


def _ratios(name: str, points: list[dict]) -> dict[int, Ratio]:
    return {p["seq_len"]: ratio(p["speedup"]) for p in points if p["speedup"] and regime(p["attention_share"]) == name}


def _regime(name: str, ratios: dict[int, Ratio], basis: str, result: dict, old: str, new: str) -> dict:
    price, values = result["money"]["price_ratio"], [r.value for r in ratios.values()]
    speed = f"{between(min(values), max(values))} the speed ({basis})"
    wins_under = min(min(r.low or r.value, r.value / (1 + cost.TOLERANCE)) for r in ratios.values())
    loses_over = max(max(r.high or r.value, r.value / (1 - cost.TOLERANCE)) for r in ratios.values())
    change = f"a price ratio under {wins_under:.2f} (it wins) or over {loses_over:.2f} (it loses)"
    outcomes = {n: cost.outcome(r, price) for n, r in ratios.items()} if price else {}
    kinds = sorted(set(outcomes.values()))
    if not price:
        outcome, text = None, f"{speed}, so it pays up to that price ratio"
    elif len(kinds) > 1:
        outcome = "depends"
        parts = [f"{k} at {', '.join(str(n) for n in outcomes if outcomes[n] == k)}" for k in kinds]
        text = f"{'; '.join(parts)}: {speed} for {price:.2f}x the price"
    else:
        outcome, extra = kinds[0], [price / v - 1 for v in values]
        text = f"{outcome}: {speed} for {price:.2f}x the price, "
        if outcome == cost.EVEN:
            text += f"the same per token{_tie(result, list(ratios)[-1], old, new)}"
        elif outcome == cost.WINS:
            text += f"{between(-max(extra), -min(extra), '{:.0%}')} less per token"
        else:
            text += f"{between(min(extra), max(extra), '{:.0%}')} more per token"
            change = f"a price ratio of {between(min(values), max(values), '{:.2f}')} (break-even){_held(name, result)}"
    change += _packed(name, result)
    lengths = between(min(ratios), max(ratios), "{:d}")
    decided_by = {"figure": "speedup", "low": min(values), "high": max(values), "price_ratio": price}
    return _verdict(name, outcome, f"{NAMES[name]} ({lengths} tokens): {text}.", decided_by, change)


def _tie(result: dict, seq_len: int, old: str, new: str) -> str:
    """At equal cost, time and memory decide."""
    hours = next(([p["old_hours"], p["new_hours"]] for p in result["money"]["points"] if p["seq_len"] == seq_len), None)
    text = f"; the tie goes to the shorter time ({hours[1]:.1f} h for {hours[0]:.1f} h at {seq_len})" if hours else ""
    sizes = [result["memory"][side]["largest_usable"] for side in ("old", "new")]
    if all(sizes) and sizes[1] > sizes[0]:
        text += f" and the memory (by the fit {new} holds {about(sizes[1])} tokens, {old} {about(sizes[0])})"
    return text


def _held(name: str, result: dict) -> str:
    for step in result["speed"]["buckets"]:
        bucket = step["holds_back"]
        if bucket and step["ratios"][bucket] and regime(step["attention_share"]) == name:
            share = step["share_of_new_step"][bucket]
            return f', or a faster "{bucket}": {share:.0%} of the new step, {step["ratios"][bucket]:.2f}x'
    return ""


def _packed(name: str, result: dict) -> str:
    """Short documents in a long sequence have large matmuls, which a short step has not."""
    d = result.get("documents")
    if not d or d["regime"] != name or name != "short" or not d["fitted"]:
        return ""
    return f"; or packing: in {d['seq_len']} tokens the sweep's fit expects {d['fitted']:.2f}x (DOC_LEN measures it)"


def about(seq_len: int | None) -> str:
    """A predicted length, to the thousand."""
    return "-" if seq_len is None else f"{round(seq_len, -3):,}"


def between(low: float, high: float, form: str = "{:.2f}x") -> str:
    a, b = form.format(low), form.format(high)
    return a if a == b else f"{a.rstrip('x%')}-{b}"
