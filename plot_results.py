"""Two result folders -> the figure, and every table in Markdown.

    python plot_results.py                                    # the published H200 and B200 -> results_plot.png
    python plot_results.py results/nvidia-h200 results/nvidia-b200 -o plot.svg
    python plot_results.py OLD NEW --tables                   # all tables to standard output, no figure
    python plot_results.py OLD NEW --table speedup --table memory    # only these
    python plot_results.py --readme README.md                 # rewrites the tables between its markers

OLD and NEW are result folders of the two boxes, or single files of them. A marker is <!-- table:speedup -->, closed by
<!-- /table:speedup -->; specifications and ceilings also take two GPUs: <!-- table:specifications B200 B300 -->.
The tables need no matplotlib. A price adds the cost of a token to both.

Exit codes: 0 done; 1 the file could not be written; 2 wrong use, or matplotlib is missing; 3 the boxes are not
comparable (every difference is listed); 4 nothing usable in OLD or NEW.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from harness import gpus
from harness.report import cost, decision, tables
from harness.report.box import NothingUsable
from harness.report.reading import read_box

PUBLISHED = Path(__file__).resolve().parent / "results" / "published"
PUBLISHED_PRICE_RATIO = 2.0  # what the published guide reckons with; the default for its two boxes only
MARKER = re.compile(r"(<!-- table:([^\n>]+?) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    try:
        boxes = read_box(args.old or PUBLISHED / "h200"), read_box(args.new or PUBLISHED / "b200")
    except NothingUsable as error:
        print(error, file=sys.stderr)
        return 4
    view = tables.view(*boxes, args.options)
    for side, box in zip(("OLD", "NEW"), boxes, strict=True):
        for problem in box.problems:
            print(f"{side}: {problem}", file=sys.stderr)
    found = tables.make(view)
    reasons = view.result["comparable"]["never"] + view.result["comparable"]["differences"]
    if not found or (view.pair and "speed" not in view.result):
        print(f"not comparable: {'; '.join(reasons) or 'no figures of the same kind'}", file=sys.stderr)
        if found and not view.result["comparable"]["never"]:
            print("--allow-mismatch goes on all the same, with this list in the output", file=sys.stderr)
        return 3
    try:
        if args.readme:
            text = args.readme.read_text(encoding="utf-8")
            args.readme.write_text(filled(text, found), encoding="utf-8")
        elif args.tables or args.table:
            print("\n".join(found[name].markdown() for name in chosen(args.table, found)), end="")
        else:
            return plot(view, args.output)
    except KeyError as error:
        parser.error(error.args[0])
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def plot(view: tables.View, path: Path) -> int:
    """Draw, save, say where."""
    from harness.report import figure

    try:
        figure.save(figure.draw(view), path)
    except ImportError as error:
        print(f"{error}: pip install matplotlib, or --tables, which needs none", file=sys.stderr)
        return 2
    print(path)
    return 0


def chosen(names: list[str], found: dict[str, tables.Table]) -> list[str]:
    """The names given, all without any. Raises KeyError for one there is no data for."""
    for name in names:
        if name not in found:
            raise KeyError(f"no table {name!r} from these boxes; there are: {', '.join(found)}")
    return names or list(found)


def filled(text: str, found: dict[str, tables.Table]) -> str:
    """The text with the tables between their markers replaced. Raises KeyError for a table or a GPU there is not."""

    def table(match: re.Match) -> str:
        name, *pair = match[2].split()
        if pair:
            made = {"specifications": tables.specifications, "ceilings": tables.ceilings}
            body = made[chosen([name], made)[0]](*map(gpus.by_key, pair)).markdown()
        else:
            body = found[chosen([name], found)[0]].markdown()
        return f"{match[1]}{body}{match[3]}"

    return MARKER.sub(table, text)


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked; args.options is a decision.Options."""
    usage, _, details = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=usage, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("old", nargs="?", metavar="OLD", help="result folder of the box you have (default: the published H200)")
    add("new", nargs="?", metavar="NEW", help="result folder of the box you consider (default: the published B200)")
    add("-o", "--output", type=Path, metavar="FILE", help="the figure (default: results_plot.FORMAT)")
    add("--format", choices=("png", "svg", "pdf"), help="of the figure (default: by the ending of FILE, or png)")
    add("--tables", action="store_true", help="print every table in Markdown, draw no figure")
    add("--table", action="append", default=[], metavar="NAME", help="print this one; may be repeated")
    add("--readme", type=Path, metavar="FILE", help="rewrite the tables between the markers of this file")
    add("--price-old", type=price, metavar="X", help="per GPU and hour")
    add("--price-new", type=price, metavar="Y", help="per GPU and hour")
    add("--price-ratio", type=price, metavar="R", help="new price / old price, when only that is known")
    add("--allow-mismatch", action="store_true", help="go on although the boxes are not comparable")
    args = parser.parse_args(argv)
    if args.old and not args.new:
        parser.error("NEW is missing: the result folder of the second box")
    if (args.price_old is None) != (args.price_new is None):
        parser.error("--price-old and --price-new go together")
    if args.price_old and args.price_ratio:
        parser.error("--price-ratio is one way to say it, --price-old and --price-new the other: give one")
    name = args.output or Path("results_plot")
    if name.suffix[1:] not in ("png", "svg", "pdf"):
        if args.output and name.suffix and not args.format:
            parser.error(f"{name}: the ending is none of .png, .svg, .pdf; or say --format")
        name = name.with_name(f"{name.name}.{args.format or 'png'}")
    elif args.format and name.suffix != f".{args.format}":
        parser.error(f"{name} and --format {args.format} contradict each other")
    args.output = name
    ratio = args.price_ratio
    if not args.old and not args.price_old and ratio is None:
        ratio = PUBLISHED_PRICE_RATIO
    args.options = decision.Options(
        price_old=args.price_old, price_new=args.price_new, price_ratio=ratio, allow_mismatch=args.allow_mismatch
    )
    return parser, args


def price(text: str) -> float:
    """argparse shows the text of an ArgumentTypeError, and only of that."""
    try:
        return cost.positive(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
