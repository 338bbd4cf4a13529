"""The verdicts: one sentence per regime, with the figure that decides it and what would change it.

Only lengths measured on both boxes count. Each function takes the dict of decision.decide, as far as it is built.
"""

from __future__ import annotations

from dataclasses import asdict

from harness.report import cost
from harness.report.comparing import regime
from harness.stats import Ratio

NAMES = {
    "long": "Long context, one document a sequence",
    "mixed": "In between",
    "short": "Short or packed",
    "unknown": "All lengths (the model's FLOPs are not known)",
}
ADVICE = {
    "not worth renting": ("Not worth renting", "it loses even at the high end"),
    "rent": ("Rent one and measure", "break-even lies inside the range"),
    "likely buy": ("Likely worth buying; rent one to confirm", "it pays even at the low end"),
}


def verdicts(result: dict) -> list[dict]:
    """Of a complete result: what is not equal, a need that decides, then a sentence per regime."""
    c, old, new, found = result["comparable"], result["question"]["old"], result["question"]["new"], []
    if not c["ok"]:
        text = f"{old} and {new} differ in {'; '.join(c['differences'])}: what follows compares that too."
        found.append(_verdict("comparability", None, text, None, "an equal stack, model and recipe on both boxes"))
    found += [_need(answer, old, new) for answer in result["gate"]["needs"] if answer["decides"] != "no"]
    evidence = {name: _evidence(name, result) for name in NAMES}
    for name, (ratios, basis) in evidence.items():
        if ratios:
            row = _regime(name, ratios, basis, result)
        elif name in ("long", "short") and not evidence["unknown"][0]:
            share = "over two thirds" if name == "long" else "under one third"
            text = f"{NAMES[name]}: no common length has attention {share} of the FLOPs."
            row = _verdict(name, None, text, None, "measuring one")
        else:
            continue
        found.append(row | {"yours": result.get("documents", {}).get("regime") == name})
    return found


def renting(line: dict, price: float | None, target: str) -> dict:
    """Whether a box of the target is worth renting to measure; a projection never decides a purchase.

    Break-even is a speedup equal to the price ratio: inside the range it takes a measurement to tell.
    """
    low, high = line["low"], line["high"]
    reach = f"{target} is projected at {between(low, high)} the speed ({_class(line)})"
    decided_by = {"figure": "projected speedup", "low": low, "high": high, "price_ratio": price}
    if price is None:
        sentence = f"{reach}; whether renting one pays depends on its price."
        return _verdict("renting", None, sentence, decided_by, "--price-ratio")
    advice = "not worth renting" if high < price else "likely buy" if low > price else "rent"
    change = {"not worth renting": f"a price ratio under {high:.2f}", "likely buy": f"a price ratio over {low:.2f}"}
    (word, where), measuring = ADVICE[advice], "the measurement, which alone tells the side of break-even"
    sentence = f"{word}: {reach} for {price:.2f}x the price; {where}."
    return _verdict("renting", advice, sentence, decided_by, change.get(advice, measuring))


def class_of_pairs(line: dict, price: float | None) -> dict:
    """Of one kind of work and two precisions, what the published pairs say at this price."""
    low, high, outcome = line["low"], line["high"], line["outcome"]
    models = f"{len(line['models'])} model{'s' * (len(line['models']) > 1)}"
    pairs = f"{line['pairs']} pair{'s' * (line['pairs'] > 1)} of {models}, median {line['median']:.2f}x"
    speed = f"{between(low, high)} the speed ({pairs})"
    if outcome is None:
        text = f"{speed}, so it pays up to that price ratio"
    else:
        counts = ", ".join(f"{kind} in {n}" for kind, n in sorted(line["outcomes"].items()))
        text = f"{counts if outcome == 'depends' else outcome}: {speed} for {price:.2f}x the price"
    all_win, all_lose = low / (1 + cost.TOLERANCE), high / (1 - cost.TOLERANCE)
    change = f"a price ratio under {all_win:.2f} (all win) or over {all_lose:.2f} (all lose)"
    decided_by = {"figure": "speedup", "low": low, "high": high, "price_ratio": price}
    sentence = f"{_class(line)[0].upper()}{_class(line)[1:]}: {text}."
    return _verdict(_class(line), outcome, sentence, decided_by, change)


def _class(line: dict) -> str:
    return f"{line['work'] or 'unknown work'}, {line['old_precision']} -> {line['new_precision']}"


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
    main = {"heavy_recipe": result["comparable"]["heavy_recipe"], "points": result["speed"]["points"]}
    sources = [(main["points"], "measured")]
    if name == "short":
        light = [s["points"] for s in (main, *result["speed"]["others"]) if not s["heavy_recipe"]]
        steps = [b | {"speedup": asdict(Ratio(b["speedup"]))} for b in result["speed"]["buckets"]]
        sources = [(points, "measured") for points in light]
        sources += [([s], "the decomposed step, without offload or recompute") for s in steps if not s["heavy_recipe"]]
        sources.append((main["points"], "measured in a recipe made for long context, so not representative"))
    for points, basis in sources:
        usable = [p for p in points if p["speedup"] and regime(p["attention_share"]) == name]
        if usable:
            return {p["seq_len"]: ratio(p["speedup"]) for p in usable}, basis
    return {}, ""


def _regime(name: str, ratios: dict[int, Ratio], basis: str, result: dict) -> dict:
    price, values = result["money"]["price_ratio"], [r.value for r in ratios.values()]
    low, high = min(values), max(values)
    speed = f"{between(low, high)} the speed ({basis})"
    wins_under = min(min(r.low or r.value, r.value / (1 + cost.TOLERANCE)) for r in ratios.values())
    loses_over = max(max(r.high or r.value, r.value / (1 - cost.TOLERANCE)) for r in ratios.values())
    change = f"a price ratio under {wins_under:.2f} (it wins) or over {loses_over:.2f} (it loses)"
    outcomes = {n: cost.outcome(r, price) for n, r in ratios.items()} if price else {}
    kinds = sorted(set(outcomes.values()))
    outcome = None if not price else kinds[0] if len(kinds) == 1 else "depends"
    if outcome is None:
        text = f"{speed}, so it pays up to that price ratio"
    elif outcome == "depends":
        parts = [f"{k} at {', '.join(str(n) for n in outcomes if outcomes[n] == k)}" for k in kinds]
        text = f"{'; '.join(parts)}: {speed} for {price:.2f}x the price"
    else:
        text = f"{outcome}: {speed} for {price:.2f}x the price, "
        if outcome == cost.EVEN and all(r.significant is False for r in ratios.values()):
            text += "no difference was measured"
        elif outcome == cost.EVEN:
            text += f"the same per token{_tie(result, max(ratios))}"
        elif outcome == cost.WINS:
            text += f"{between(1 - price / low, 1 - price / high, '{:.0%}')} less per token"
        else:
            text += f"{between(price / high - 1, price / low - 1, '{:.0%}')} more per token"
            change = f"a price ratio of {between(low, high, '{:.2f}')} (break-even){_held(name, result)}"
    lengths = "unknown length" if None in ratios else f"{between(min(ratios), max(ratios), '{:d}')} tokens"
    sentence = f"{NAMES[name]} ({lengths}): {text}."
    decided_by = {"figure": "speedup", "low": low, "high": high, "price_ratio": price}
    return _verdict(name, outcome, sentence, decided_by, change + _packed(name, result))


def _tie(result: dict, seq_len: int) -> str:
    """At equal cost, time and memory decide."""
    rows = [p for p in result["money"]["points"] if p["new_hours"] and p["old_hours"]]
    hours = {p["seq_len"]: f"{p['new_hours']:.1f} h for {p['old_hours']:.1f} h" for p in rows}
    text = f"; the tie goes to the shorter time ({hours[seq_len]} at {seq_len})" if seq_len in hours else ""
    (old, few), (new, many) = ((result["question"][s], result["memory"][s]["largest_usable"]) for s in ("old", "new"))
    if few and many and many > few:
        text += f" and the memory (by the fit {new} holds {about(many)} tokens, {old} {about(few)})"
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
    d = result.get("documents", {"fitted": None})
    if name != "short" or not d["fitted"] or d["regime"] != "short":
        return ""
    return f"; or packing: in {d['seq_len']} tokens the sweep's fit expects {d['fitted']:.2f}x (DOC_LEN measures it)"


def about(seq_len: int | None) -> str:
    """A predicted length, to the thousand."""
    return "-" if seq_len is None else f"{round(seq_len, -3):,}"


def between(low: float, high: float, form: str = "{:.2f}x") -> str:
    a, b = form.format(low), form.format(high)
    return a if a == b else f"{a.rstrip('x%')}-{b}"
