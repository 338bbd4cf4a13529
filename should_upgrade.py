"""Two boxes and their prices -> is the upgrade worth it, and why.

    python should_upgrade.py                # the published H200 and B200, the B200 at twice the price
    python should_upgrade.py results/nvidia-h200 results/nvidia-b200 --price-old 2.5 --price-new 4.9
    python should_upgrade.py OLD NEW --price-ratio 2 --needs fp4,memory=170GiB     # what OLD must not lack
    python should_upgrade.py OLD NEW --price-ratio 2 --doc-len 8192  # your data: documents of 8192 tokens, packed
    python should_upgrade.py old.log new.log --new gpu=B200 --price-ratio 2   # logs of a trainer you already run
    python should_upgrade.py OLD NEW --price-ratio 2 --json        # the same content for programs
    python should_upgrade.py OLD NEW --price-ratio 2 --html upgrade.html    # one page to send to the person who pays
    python should_upgrade.py H100 B200 --price-ratio 2.2   # GPUs by name: what others measured on both
    python should_upgrade.py H100 B200 --model llama --precision fp8 --new-precision nvfp4    # of that only
    python should_upgrade.py --list                                 # which pairs of GPUs others measured
    python should_upgrade.py OLD --project-to B300 --price-ratio 1.4   # before renting: what to expect, as a range
    python should_upgrade.py "RTX PRO 6000" B200 --price-ratio 3.4 --fleet 7+1:3+1 --fleet-base 3+1=8.8

OLD and NEW are result folders of the two boxes, single files of them, logs of another trainer (what a log does not
say comes from box.toml beside it, or --old and --new), or names of GPUs. Prices are
per GPU and hour in any currency. Without a price the answer is the price ratio up to which the upgrade pays. The page
goes in the order of deciding: what OLD cannot do at all, whether the two are comparable, speed, memory, money, verdict.

Exit codes: 0 done; 1 the page could not be written; 2 wrong use, or a package is missing; 3 the boxes are not
comparable (every difference is listed) or have no length in common; 4 nothing usable in OLD or NEW.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from harness import gpus
from harness.report import command, cost, decision, published, tables
from harness.report.box import Box, NothingUsable, named
from harness.report.reading import read_box
from harness.report.verdict_text import Page

PAGE_WIDTH = 118  # columns when the output is no terminal


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PAGE_WIDTH)
    if args.list:
        Page.bare(console).show_table(tables.coverage(published.coverage()))
        return 0
    try:
        ask = asked(args)
        view = ask(args.options)
    except NothingUsable as error:
        print(error, file=sys.stderr)
        return 4
    except ValueError as error:
        parser.error(str(error))
    result = view.result
    if args.html and (code := write_page(args, ask, parser)):
        return code
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    elif args.html:
        print(args.html)
    else:
        Page(result, console).show()
    compared = result.get("comparable")
    if not compared or ("speed" in result and compared["common"]):
        return 0
    hint = "no flag overrides that" if compared["never"] else "--allow-mismatch goes on all the same"
    text = "no length was measured on both boxes" if "speed" in result else f"not comparable; {hint}"
    print(text, file=sys.stderr)
    return 3


def asked(args: argparse.Namespace) -> Callable[[decision.Options], tables.View]:
    """The decision of the command line for any options, from boxes read once. Raises NothingUsable; what it returns
    also raises ValueError, for options that lack something."""
    pair = command.PUBLISHED / "h200", command.PUBLISHED / "b200"
    old_path, new_path = args.old or pair[0], args.new or pair[1]
    if target := args.project_to:
        guide = tuple(map(read_box, pair)) if all(p.is_dir() for p in pair) else None
        old = box(old_path, True, args.old_facts)
        new = Box(old.folder, target.label, target)
        return lambda options: tables.View(old, new, None, decision.project(old, target, options, guide))
    if args.gpus_by_name and not args.fleet:
        return partial(tables.view_by_name, *args.gpus_by_name)
    old, new = box(old_path, args.fleet, args.old_facts), box(new_path, args.fleet, args.new_facts)
    return partial(tables.view, old, new)


def box(path: str | Path, by_name: object, facts: Sequence[str]) -> Box:
    """A measured box; with by_name also the bare specification of a GPU by that name. Raises NothingUsable."""
    if by_name and not Path(path).exists():
        with contextlib.suppress(KeyError):
            return named(gpus.by_key(str(path)))
    return read_box(path, facts)


def write_page(args: argparse.Namespace, ask: Callable, parser: command.Parser) -> int:
    """0, or 1 when the file could not be written. Ends the script when a package is missing."""
    try:
        from harness.report import page

        page.write(args.html, ask, args.options)
    except ImportError as error:
        parser.error(f"{error}, which --html needs: pip install -r requirements/report.txt")
    except OSError as error:
        print(f"{args.html}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str] | None) -> tuple[command.Parser, argparse.Namespace]:
    """The command line, checked; args.options is a decision.Options."""
    parser = command.Parser(__doc__)

    whole, share = partial(cost.positive, kind=int), partial(cost.positive, most=1)

    def add(flag: str, convert, metavar: str, help: str, default=None) -> None:
        parser.add_argument(flag, type=command.checked(convert), metavar=metavar, help=help, default=default)

    add(
        "--needs",
        lambda text: tuple(text.replace(" ", "").split(",")),
        "LIST",
        f"{', '.join(gpus.DTYPES)}, memory=200GiB",
        (),
    )
    add("--doc-len", whole, "N", "tokens of a document in your packed data")
    add("--tokens", cost.positive, "N", "size of the job that is timed (default: 1e9)", 1e9)
    add("--gpus", whole, "N", "GPUs of that job (default: as many as were measured)")
    add("--project-to", gpus.by_key, "GPU", "a GPU by name instead of NEW")
    add("--fleet", _fleet, "OLD:NEW", "WORKERS+HELPERS of each: 7+1:3+1")
    add("--fleet-base", _base, "CREW=DAYS", "days of the job on that many old GPUs: 3+1=8.8")
    add("--scaling", share, "S", "share of linear speedup kept by more workers than the base has (default: 1)", 1.0)
    add("--model", str, "NAME", "published figures of models whose name has this in it")
    add("--seq-len", whole, "N", "published figures of this length")
    for flag, side in (("--precision", "OLD"), ("--new-precision", "NEW")):
        parser.add_argument(flag, choices=gpus.DTYPES, help=f"of {side} in published figures and projections")
    parser.add_argument("--list", action="store_true", help="which pairs of GPUs were published, and how often")
    parser.add_argument("--json", action="store_true", help="the whole result as JSON")
    add("--html", Path, "FILE", "one page to send, with a slider for the price ratio, instead of the text")
    args = parser.parse_args(argv)
    args.price_ratio = parser.price_ratio(args)
    if args.project_to and (args.new or args.fleet):
        parser.error("--project-to takes OLD alone")
    if args.old and not args.new and not args.project_to:
        parser.error("NEW is missing: a second result folder, or --project-to GPU")
    if args.fleet and not (args.price_ratio or args.price_old):
        parser.error("--fleet needs a price: --price-ratio, or --price-old and --price-new")
    args.gpus_by_name = parser.two_gpus(args)
    args.narrow = published.Narrow(args.model, args.seq_len, args.precision, args.new_precision)
    if args.narrow != published.Narrow() and not (args.gpus_by_name or args.project_to):
        parser.error("--model, --seq-len and the precisions narrow published figures: give two GPUs by name")
    args.options = decision.Options(**{f.name: getattr(args, f.name) for f in dataclasses.fields(decision.Options)})
    return parser, args


def _fleet(text: str) -> tuple[cost.Crew, cost.Crew]:
    old, _, new = text.partition(":")
    return cost.parse_crew(old), cost.parse_crew(new)


def _base(text: str) -> tuple[cost.Crew, float]:
    crew, _, days = text.partition("=")
    return cost.parse_crew(crew), cost.positive(days)


if __name__ == "__main__":
    sys.exit(main())
