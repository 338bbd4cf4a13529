"""The decision dict as one page of text; its tables are those of tables.py. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harness.report import tables
from harness.report.table import Table, known, names, setup_name
from harness.report.verdict import ratio

WORDS = {True: "yes", False: "no", None: "unknown"}


class Page:
    """Sections as methods; `old` and `new` are the names the boxes go by."""

    def __init__(self, result: dict, console: Console):
        self.result, self.console = result, console
        self.names = names(result)
        self.old, self.new = self.names.values()

    def show(self) -> None:
        """Every section the result has, in its order."""
        price = self.result["question"]["price_ratio"]
        at = f" at {price:.2f}x the price per GPU" if price else ", no price given"
        self.say(f"{self.old} -> {self.new}{at}", "bold")
        self.bullets(self.result["question"]["problems"])
        for name, section in self.result.items():
            if name != "question":
                getattr(self, name)(section)

    @classmethod
    def bare(cls, console: Console) -> Page:
        """A page of no decision, for a table alone."""
        return cls({"question": {"old": "", "new": ""}}, console)

    def gate(self, gate: dict) -> None:
        self.head(f"Does {self.old} lack something you need?")
        only = ", ".join(gate["only_new"])
        if only:
            self.say(f"Only {self.new} has {only}; say what you need with --needs.")
        else:
            self.say(f"No dtype is known that {self.new} has and {self.old} has not.")
        rows = [[a["need"], WORDS[a["old_can"]], WORDS[a["new_can"]], a["new_stack"]] for a in gate["needs"]]
        self.table(["need", f"{self.old} can", f"{self.new} can", f"{self.new}'s software"], rows)

    def formats(self, rows: list[dict]) -> None:
        self.head("What does another format give, without buying anything?")
        for row in rows:
            fmt, name = row["format"], self.names[row["side"]]
            what = f"{fmt['recipe']}, {fmt['converted']} of {fmt['total']} layers" if fmt else "as logged"
            fake = ", emulated: its time says nothing of the format" if fmt and fmt["emulated"] else ""
            parts = ", ".join(f"{p['seq_len']}: {ratio(p['speedup'])}" for p in row["points"])
            self.say(f"Same box, other format: {name}, {setup_name(row)} over bf16 ({what}{fake}): {parts}.")
            form = "{loss:.4g} for {bf16_loss:.4g} after {steps} at {seq_len}"
            texts = [form.format_map(p) for p in row["points"] if p["steps"]]
            self.say(f"  Loss beside bf16's, after as many steps: {', '.join(texts) or 'not recorded'}.")

    def comparable(self, c: dict) -> None:
        self.head(f"Are they comparable? {'Yes' if c['ok'] else 'No, compared all the same' if c['allowed'] else 'No'}")
        if "stack" in c:
            stack = [f"{k} {c['stack'][k]}" for k in ("torch", "transformers", "deepspeed") if c["stack"][k]]
            what = [c["model"], c["recipe"] and setup_name(c), c["gpus"] and f"{c['gpus']} GPUs", *stack]
            attention = ", ".join(f"{c['attention'][side]} on {name}" for side, name in self.names.items())
            attention = f"; attention {attention}" if any(c["attention"].values()) else ""
            if any(what):
                self.say(f"{', '.join(filter(None, what))}{attention}.")
        self.bullets(f"DIFFERENT {text}" for text in [*c["never"], *c["differences"]])
        self.bullets(c["warnings"])

    def speed(self, speed: dict) -> None:
        self.head("How much faster?")
        self.specs(speed["ratios"])
        self.show_table(tables.speedup(self.result, tables.timed(self.result)))
        for side, name in self.names.items():
            failed = {p["seq_len"]: p[side]["error"] for p in speed["points"] if p[side]["outcome"] == "failed"}
            self.bullets(f"{name} failed at {n}: {error}" for n, error in failed.items() if error)
        for b in speed["buckets"]:
            parts = ", ".join(f"{name} {known(r, '{:.2f}x')}" for name, r in b["ratios"].items())
            held, share = b["holds_back"], b["share_of_new_step"]
            held = f'; "{held}", {share[held]:.0%} of the new step, holds it back' if held in share else ""
            self.say(f"Decomposed at {b['seq_len']} ({setup_name(b)}): {b['speedup']:.2f}x: {parts}{held}.")
        if all(speed["fit"].values()):
            a, b = speed["fit"]["old"], speed["fit"]["new"]
            self.say(
                f"Part of every step does not grow with the length (host optimizer, launches): {a['fixed_ms']:,.0f} ms "
                f"on {self.old}, {b['fixed_ms']:,.0f} ms on {self.new}. This comes from a fit that is off by at most "
                f"{max(a['worst_error'], b['worst_error']):.1%}."
            )
        for o in speed["others"]:
            ratios = ", ".join(f"{p['seq_len']}: {ratio(p['speedup'])}" for p in o["points"] if p["speedup"])
            kernels = " and ".join(map(str, o["attention"].values()))
            self.say(f"Also on both: torch {o['stack']['torch']}, {setup_name(o)}, attention {kernels}: {ratios}.")

    def documents(self, d: dict) -> None:
        self.head(f"Documents of {d['doc_len']} tokens")
        ways = {
            "by the decomposed step (small matmuls)": d["decomposed"],
            f"by the sweep's fit, packed into {d['seq_len']} (large matmuls)": d["fitted"],
        }
        expected = " or ".join(f"{value:.2f}x {text}" for text, value in ways.items() if value) or "unknown"
        self.say(
            f"Attention is {known(d['attention_share'], '{:.1%}')} of the FLOPs, whatever they are packed into. "
            f"Expected: {expected}. Both extrapolate; DOC_LEN={d['doc_len']} measures it."
        )

    def memory(self, memory: dict) -> None:
        self.head("What fits?")
        if memory["only_new"]:
            lengths = ", ".join(map(str, memory["only_new"]))
            self.say(f"Only {self.new} ran {lengths}; {self.old} was out of memory there.")
        self.show_table(tables.capacity(self.result))

    def money(self, money: dict) -> None:
        self.head("What does a token cost?")
        if money["points"]:
            self.show_table(tables.price(self.result))
        else:
            self.say("No length was measured on both boxes, so nothing can be said.")

    def published(self, p: dict) -> None:
        self.head("What did others measure on both?")
        self.show_table(tables.published_lines(p))
        for table in tables.published_pairs(p, self.old, self.new).values():
            self.say(f"{table.title}:")
            self.show_table(table)

    def projection(self, p: dict) -> None:
        self.head(f"What to expect: a projection, this {self.new} was not measured")
        self.specs(p["ratios"])
        if p["matmul_ceilings"]["ratio"]:
            self.say(f"By the bf16 matmul ceilings: {p['matmul_ceilings']['ratio']:.2f}x.")
        self.show_table(tables.expected(p))
        self.bullets(
            dict.fromkeys(
                f"Too little is published: {x['widened']}. Used instead: {x['basis']}"
                for x in p["lines"]
                if x["widened"]
            )
        )
        for name, r in p["record"].items():
            self.say(
                f"Tried on {r['pairs']} pairs of {name}, kept from it: {r['inside']:.0%} lie inside the range. Half of "
                f"the expected speedups are off by less than {r['error']:.1%}, nine in ten by less than "
                f"{r['error_90']:.0%}. The high end of the range is {r['width']:.2f}x the low end."
            )
        if one := p["picture"]:
            self.say(
                f"By length, as one pair would have it ({one['pair']}): every part of a step at the ratio it follows. "
                "One pair, no range; whether a speedup grows with the length depends on the kernels."
            )
            self.show_table(tables.by_length(one, self.old))

    def fleet(self, f: dict) -> None:
        self.head(f"Fleet: {f['old']} {self.old} or {f['new']} {self.new} (workers+helpers)")
        forms = {"fleet": "{}", "gpus": "{:g}", "workers": "{:g}", "days": "{:.2f}", "cost": "{:.1f}"}
        rows = [[form.format(row[key]) for key, form in forms.items()] for row in f["rows"]]
        self.table(["fleet", "GPUs", "workers", "days", "cost, old GPU-days"], rows)
        need, bought = f["needed"], f"{f['old_gpus_for_the_price']:.1f} {self.old}"
        self.say(
            f"The price of {f['new']} {self.new} buys {bought}. To break even a new worker must be faster than an "
            f"old one by {need['equal_time']:.2f}x (equal time), {need['equal_spend']:.2f}x (equal cost of the "
            f"job), {need['equal_purchase']:.2f}x (equal time with those {bought})."
        )
        peaks = ", ".join(f"{name} {r:.2f}" for name, r in f["peak_ratios"].items())
        bound = "" if f["measured_speedup"] else " No speedup was measured: they are bounds, not expectations."
        self.say(f"Ratios of the specifications: {peaks}, for {f['price_ratio']:.2f}x the price.{bound}")

    def verdict(self, verdicts: list[dict]) -> None:
        self.head("Verdict")
        for v in verdicts:
            self.say(f"* {'(your documents) ' if v.get('yours') else ''}{v['sentence']}")
            self.say(f"  What would change it: {v['change']}.")

    def specs(self, ratios: dict) -> None:
        found = [f"{name} {r:.2f}x" for name, r in ratios.items() if r]
        self.say(f"By the specifications: {', '.join(found) or 'no ratio is known'}.")

    def head(self, text: str) -> None:
        self.console.print()
        self.say(text, "bold")

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style))

    def bullets(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.say(f"! {text}", "yellow")

    def show_table(self, table: Table) -> None:
        self.table(table.header, table.rows)
        for note in table.notes if table.rows else ():
            self.say(note)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        if rows:
            table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
            for i, head in enumerate(header):
                table.add_column(Text(head), justify="right" if i else "left", overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            self.console.print(table)
