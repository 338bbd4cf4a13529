"""The decision dict as one page of text. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.report.verdict import about, between, ratio

OUTCOMES = {"oom": "OOM", "failed": "failed", "not_run": "not run", "partial": "partial"}
WORDS = {True: "yes", False: "no", None: "unknown"}


class Page:
    """Sections as methods; `old` and `new` are the names the boxes go by."""

    def __init__(self, result: dict, console: Console):
        self.result, self.console = result, console
        self.old, self.new = result["question"]["old"], result["question"]["new"]
        if self.old == self.new:
            self.old, self.new = f"{self.old} (OLD)", f"{self.new} (NEW)"

    def show(self) -> None:
        """Every section the result has, in its order."""
        price = self.result["question"]["price_ratio"]
        self.say(
            f"{self.old} -> {self.new}{f' at {price:.2f}x the price per GPU' if price else ', no price given'}", "bold"
        )
        self.bullets(self.result["question"]["problems"])
        for name, section in self.result.items():
            if name != "question":
                getattr(self, name)(section)

    def gate(self, gate: dict) -> None:
        self.head(f"Does {self.old} lack something you need?")
        only = ", ".join(gate["only_new"])
        self.say(f"Only {self.new} has {only}; say what you need with --needs." if only else
                 f"No dtype is known that {self.new} has and {self.old} has not.")  # fmt: skip
        rows = [(a["need"], WORDS[a["old_can"]], WORDS[a["new_can"]], a["new_stack"]) for a in gate["needs"]]
        self.table(f"need|{self.old} can|{self.new} can|{self.new}'s software", rows)

    def comparable(self, c: dict) -> None:
        self.head(f"Are they comparable? {'Yes' if c['ok'] else 'No, compared all the same' if c['allowed'] else 'No'}")
        if "stack" in c:
            stack = ", ".join(f"{k} {c['stack'][k]}" for k in ("torch", "transformers", "deepspeed") if c["stack"][k])
            self.say(f"{c['model']}, {_recipe(c)}, {c['gpus']} GPUs, {stack}; attention {c['attention']['old']} on "
                     f"{self.old}, {c['attention']['new']} on {self.new}.")  # fmt: skip
        self.bullets(f"DIFFERENT {text}" for text in [*c["never"], *c["differences"]])
        self.bullets(c["warnings"])

    def speed(self, speed: dict) -> None:
        self.head("How much faster?")
        self.specs(speed["ratios"])
        rows = []
        for p in speed["points"]:
            share, ms = _cell(p["attention_share"], "{:.1%}"), [_time(p[side]) for side in SIDES]
            rows.append((p["seq_len"], share, *ms, _ratio(p["speedup"]), _position(p)))
        self.table(f"seqlen|attention share|{self.old} ms|{self.new} ms|speedup [95 %]|bandwidth..compute", rows)
        self.bullets(
            f"{name} {OUTCOMES[p[s]['outcome']]} at {p['seq_len']}: {p[s]['error']}"
            for s, name in (("old", self.old), ("new", self.new))
            for p in speed["points"]
            if p[s]["outcome"] == "failed" and p[s]["error"]
        )
        for b in speed["buckets"]:
            parts = ", ".join(f"{name} {_cell(r, '{:.2f}x')}" for name, r in b["ratios"].items())
            held, share = b["holds_back"], b["share_of_new_step"]
            held = f'; "{held}", {share[held]:.0%} of the new step, holds it back' if held in share else ""
            self.say(f"Decomposed at {b['seq_len']} ({_recipe(b)}): {b['speedup']:.2f}x: {parts}{held}.")
        if all(speed["fit"].values()):
            a, b = speed["fit"]["old"], speed["fit"]["new"]
            self.say(f"By a fit of the sweep (off by {max(a['worst_error'], b['worst_error']):.1%} at most) "
                     f"{a['fixed_ms']:,.0f} ms of every step on {self.old} and {b['fixed_ms']:,.0f} ms on {self.new} "
                     "do not grow with the length: the host optimizer, launches.")  # fmt: skip
        for o in speed["others"]:
            ratios = ", ".join(f"{p['seq_len']}: {_ratio(p['speedup'])}" for p in o["points"] if p["speedup"])
            kernels = f"{o['attention']['old']} and {o['attention']['new']}"
            self.say(f"Also on both: torch {o['stack']['torch']}, {_recipe(o)}, attention {kernels}: {ratios}.")

    def documents(self, d: dict) -> None:
        self.head(f"Documents of {d['doc_len']} tokens")
        ways = [(d["decomposed"], "by the decomposed step (small matmuls)"),
                (d["fitted"], f"by the sweep's fit, packed into {d['seq_len']} (large matmuls)")]  # fmt: skip
        expected = " or ".join(f"{value:.2f}x {text}" for value, text in ways if value) or "unknown"
        self.say(f"Attention is {_cell(d['attention_share'], '{:.1%}')} of the FLOPs, whatever they are packed into. "
                 f"Expected: {expected}. Both extrapolate; DOC_LEN={d['doc_len']} measures it.")  # fmt: skip

    def memory(self, memory: dict) -> None:
        self.head("What fits?")
        if memory["only_new"]:
            lengths = ", ".join(map(str, memory["only_new"]))
            self.say(f"Only {self.new} ran {lengths}; {self.old} was out of memory there.")
        rows = []
        for side, name in (("old", self.old), ("new", self.new)):
            m, fit = memory[side], memory[side]["fit"]
            line = f"{fit['floor_gib']:.1f} + {fit['gib_per_token']:.5f}/token" if fit else "-"
            error = f"{fit['rms_error_gib']:.1f} (max {fit['worst_error_gib']:.1f})" if fit else "-"
            predicted = about(m["largest_usable"]), about(m["largest_all"])
            rows.append(
                (name, _cell(m["capacity_gib"], "{:.0f}"), line, error, _cell(m["largest_measured"], "{}"), *predicted)
            )
        usable = f"fits in {memory['usable_share']:.0%} of it"
        self.table(f"|GiB|peak GiB, fit|its error GiB|longest run|{usable}|in all of it", rows)

    def money(self, money: dict) -> None:
        self.head("What does a token cost?")
        keys = [(f"{s}_{k}", f"{getattr(self, s)} {unit}", form) for k, unit, form in
                (("per_mtoken", "cost", "{:.3f}"), ("hours", "h", "{:,.1f}"), ("joules_per_token", "J/token", "{:.3g}"))
                for s in SIDES if any(p[f"{s}_{k}"] is not None for p in money["points"])]  # fmt: skip
        rows = []
        for p in money["points"]:
            word = f"{p['outcome']} ({p['cost_change']:+.0%})" if p["outcome"] else "-"
            rows.append((p["seq_len"], _ratio(p["break_even"]), word, *(_cell(p[k], form) for k, _, form in keys)))
        if not rows:
            self.say("No length was measured on both boxes, so nothing can be said.")
            return
        self.table("|".join(("seqlen", "break-even price ratio", "per token", *(head for _, head, _ in keys))), rows)
        self.say(f"Cost: {money['unit']} per 1e6 tokens. Hours: {money['tokens']:.3g} tokens on {money['gpus']} GPUs. "
                 "Within 2 %, or inside the interval, is break-even.")  # fmt: skip

    def projection(self, p: dict) -> None:
        self.head(f"What to expect: a projection, this {self.new} was not measured")
        self.specs(p["ratios"])
        if p["matmul_ceilings"]["ratio"]:
            self.say(f"By the bf16 matmul ceilings: {p['matmul_ceilings']['ratio']:.2f}x.")
        rows = [(s["label"], f"{s['old_ms']:,.0f}", between(s["low"], s["high"]), s["basis"]) for s in p["steps"]]
        self.table(f"seqlen|{self.old} ms|speedup|taken apart by", rows)
        low = f"compute as far as {p['seen']['source']} got" if p["seen"] else "the same, no published pair was found"
        self.say(f"High end: all at the ratio of the specifications. Low end: {low}. Copies (host link unknown), idle "
                 "and fixed time stay as they are.")  # fmt: skip
        rows = [(r["label"], between(r["low"], r["high"]), f"{r['measured']:.2f}x", WORDS[r["inside"]],
                 f"{r['error']:+.0%}") for r in p["back_test"]]  # fmt: skip
        if rows:
            self.say("Back-test on the published pair (its decomposed step gives the low end, so that row is no test):")
        self.table("seqlen|projected|measured|inside|error of the middle", rows)

    def fleet(self, f: dict) -> None:
        self.head(f"Fleet: {f['old']} {self.old} or {f['new']} {self.new} (workers+helpers)")
        rows = [
            (r["fleet"], f"{r['gpus']:g}", f"{r['workers']:g}", f"{r['days']:.2f}", f"{r['cost']:.1f}")
            for r in f["rows"]
        ]
        self.table("fleet|GPUs|workers|days|cost, old GPU-days", rows)
        need, bought = f["needed"], f"{f['old_gpus_for_the_price']:.1f} {self.old}"
        self.say(f"The price of {f['new']} {self.new} buys {bought}. To break even a new worker must be faster than an "
                 f"old one by {need['equal_time']:.2f}x (equal time), {need['equal_spend']:.2f}x (equal cost of the "
                 f"job), {need['equal_purchase']:.2f}x (equal time with those {bought}).")  # fmt: skip
        peaks = ", ".join(f"{name} {r:.2f}" for name, r in f["peak_ratios"].items())
        bound = "" if f["measured_speedup"] else " No speedup was measured: they are bounds, not expectations."
        self.say(f"Ratios of the specifications: {peaks}, for {f['price_ratio']:.2f}x the price.{bound}")

    def verdict(self, verdicts: list[dict]) -> None:
        self.head("Verdict")
        for v in verdicts:
            self.say(f"* {'(your documents) ' if v.get('yours') else ''}{v['sentence']}")
            self.say(f"  What would change it: {v['change']}.")

    def specs(self, ratios: dict) -> None:
        known = [f"{name} {r:.2f}x" for name, r in ratios.items() if r]
        self.say(f"By the specifications: {', '.join(known) or 'no ratio is known'}.")

    def head(self, text: str) -> None:
        self.console.print()
        self.say(text, "bold")

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style))

    def bullets(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.say(f"! {text}", "yellow")

    def table(self, heads: str, rows: list[tuple]) -> None:
        if rows:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for i, head in enumerate(heads.split("|")):
                table.add_column(Text(head), justify="right" if i else "left")
            for row in rows:
                table.add_row(*(Text(str(cell)) for cell in row))
            self.console.print(table)


SIDES = ("old", "new")


def _cell(value, form: str) -> str:
    return "-" if value is None else form.format(value)


def _time(point: dict) -> str:
    """Median ms and number of steps, or why there is none."""
    word = OUTCOMES.get(point["outcome"]) or f"{point['median_ms']:,.0f}"
    return f"{word} (n={point['n']})" if point["n"] else word


def _ratio(speedup: dict | None) -> str:
    return str(ratio(speedup)) if speedup else "-"


def _position(point: dict) -> str:
    """Where between the two ratios of the specifications a speedup lands."""
    at = point["position"]
    return "-" if at is None else "below both" if at < 0 else "above both" if at > 1 else f"{at:.0%}"


def _recipe(setup: dict) -> str:
    return f"{setup['recipe']['name']} recipe" if setup["recipe"] else "recipe unknown"
