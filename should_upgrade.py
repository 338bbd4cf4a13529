"""Two boxes and their prices -> is the upgrade worth it, and why.

    python should_upgrade.py                # the published H200 and B200, the B200 at twice the price
    python should_upgrade.py results/nvidia-h200 results/nvidia-b200 --price-old 2.5 --price-new 4.9
    python should_upgrade.py OLD NEW --price-ratio 2 --needs fp4,memory=170GiB     # what OLD must not lack
    python should_upgrade.py OLD NEW --price-ratio 2 --doc-len 8192  # your data: documents of 8192 tokens, packed
    python should_upgrade.py OLD NEW --price-ratio 2 --json        # the same content for programs
    python should_upgrade.py OLD --project-to B300 --price-ratio 1.4   # before renting: what to expect, as a range
    python should_upgrade.py "RTX PRO 6000" B200 --price-ratio 3.4 --fleet 7+1:3+1 --fleet-base 3+1=8.8

OLD and NEW are result folders of the two boxes, or single files of them; with --fleet also names of GPUs. Prices are
per GPU and hour in any currency. Without a price the answer is the price ratio up to which the upgrade pays. The page
goes in the order of deciding: what OLD cannot do at all, whether the two are comparable, speed, memory, money, verdict.

Exit codes: 0 done; 2 wrong use; 3 the boxes are not comparable (every difference is listed) or have no length in
common; 4 nothing usable in OLD or NEW.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from harness import gpus
from harness.report import cost, decision, gate
from harness.report.box import Box, NothingUsable
from harness.report.reading import read_box
from harness.report.verdict_text import Page

PUBLISHED = Path(__file__).resolve().parent / "results" / "published"
PUBLISHED_PRICE_RATIO = 2.0  # what the published guide reckons with; the default for its two boxes only
PAGE_WIDTH = 118  # columns when the output is no terminal


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    try:
        result = answer(args, parser)
    except NothingUsable as error:
        print(error, file=sys.stderr)
        return 4
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PAGE_WIDTH)
        Page(result, console).show()
    if "comparable" not in result:
        return 0
    if "speed" not in result:
        print(
            "not comparable; --allow-mismatch goes on all the same" * (not result["comparable"]["never"]),
            file=sys.stderr,
        )
        return 3
    if not result["comparable"]["common"]:
        print("no length was measured on both boxes", file=sys.stderr)
        return 3
    return 0


def answer(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict:
    """The decision dict of the command line. Raises NothingUsable."""
    options = args.options
    old_path, new_path = args.old or PUBLISHED / "h200", args.new or PUBLISHED / "b200"
    if args.project_to:
        pair = (PUBLISHED / "h200", PUBLISHED / "b200")
        published = tuple(map(read_box, pair)) if all(p.is_dir() for p in pair) else None
        return decision.project(read_box(old_path), args.project_to, options, published)
    old, new = box(old_path, options.fleet), box(new_path, options.fleet)
    try:
        if options.fleet and not old.sweeps and not new.sweeps:
            return decision.fleet_only(old, new, options)
        return decision.decide(old, new, options)
    except ValueError as error:
        parser.error(str(error))


def box(path: str | Path, by_name: object) -> Box:
    """A measured box; with by_name also the bare specification of a GPU by that name. Raises NothingUsable."""
    if by_name and not Path(path).exists():
        try:
            gpu = gpus.by_key(str(path))
        except KeyError:
            pass
        else:
            return Box(Path(), gpu.label, gpu)
    return read_box(path)


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked; args.options is a decision.Options."""
    usage, _, details = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=usage, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = _typed(cost.positive)
    add = parser.add_argument
    add("old", nargs="?", metavar="OLD", help="result folder of the box you have (default: the published H200)")
    add("new", nargs="?", metavar="NEW", help="result folder of the box you consider (default: the published B200)")
    add("--price-old", type=positive, metavar="X", help="per GPU and hour")
    add("--price-new", type=positive, metavar="Y", help="per GPU and hour")
    add("--price-ratio", type=positive, metavar="R", help="new price / old price, when only that is known")
    add("--needs", type=_typed(_needs), default=(), metavar="LIST", help=f"{', '.join(gpus.DTYPES)}, memory=200GiB")
    add("--doc-len", type=_typed(_whole), metavar="N", help="tokens of a document in your packed data")
    add("--tokens", type=positive, default=1e9, metavar="N", help="size of the job that is timed (default: 1e9)")
    add("--gpus", type=_typed(_whole), metavar="N", help="GPUs of that job (default: as many as were measured)")
    add("--project-to", type=_typed(_gpu), metavar="GPU", help="a GPU by name instead of NEW")
    add("--fleet", type=_typed(_fleet), metavar="OLD:NEW", help="WORKERS+HELPERS of each, such as 7+1:3+1")
    add("--fleet-base", type=_typed(_base), metavar="CREW=DAYS", help="days of the job on that many old GPUs: 3+1=8.8")
    add("--scaling", type=_typed(_share), default=1.0, metavar="S",
        help="share of linear speedup kept by more workers than the base has (default: 1)")  # fmt: skip
    add("--allow-mismatch", action="store_true", help="go on although the boxes are not comparable")
    add("--json", action="store_true", help="the whole result as JSON")
    args = parser.parse_args(argv)
    if (args.price_old is None) != (args.price_new is None):
        parser.error("--price-old and --price-new go together")
    if args.price_old and args.price_ratio:
        parser.error("--price-ratio is one way to say it, --price-old and --price-new the other: give one")
    if args.project_to and (args.new or args.fleet):
        parser.error("--project-to takes OLD alone")
    if args.old and not args.new and not args.project_to:
        parser.error("NEW is missing: a second result folder, or --project-to GPU")
    ratio = args.price_ratio
    if not args.old and not args.price_old and ratio is None:
        ratio = PUBLISHED_PRICE_RATIO
    if args.fleet and not (ratio or args.price_old):
        parser.error("--fleet needs a price: --price-ratio, or --price-old and --price-new")
    args.options = decision.Options(
        args.price_old, args.price_new, ratio, args.needs, args.doc_len, args.tokens, args.gpus, args.allow_mismatch,
        args.fleet, args.fleet_base, args.scaling,
    )  # fmt: skip
    return parser, args


def _typed(convert):
    """argparse shows the text of an ArgumentTypeError, and only of that."""

    def checked(text: str):
        try:
            return convert(text)
        except (ValueError, KeyError) as error:
            raise argparse.ArgumentTypeError(error.args[0]) from error

    return checked


def _needs(text: str) -> tuple[str, ...]:
    needs = tuple(word.strip() for word in text.split(",") if word.strip())
    for need in needs:
        gate.parse_need(need)
    return needs


def _whole(text: str) -> int:
    value = cost.positive(text)
    if value != int(value):
        raise ValueError(f'"{text}" is not a whole number')
    return int(value)


def _share(text: str) -> float:
    value = cost.positive(text)
    if value > 1:
        raise ValueError(f'"{text}" is over 1')
    return value


def _gpu(text: str) -> gpus.Gpu:
    return gpus.by_key(text)


def _fleet(text: str) -> tuple[cost.Crew, cost.Crew]:
    old, _, new = text.partition(":")
    return cost.parse_crew(old), cost.parse_crew(new)


def _base(text: str) -> tuple[cost.Crew, float]:
    crew, _, days = text.partition("=")
    return cost.parse_crew(crew), cost.positive(days)


if __name__ == "__main__":
    sys.exit(main())
