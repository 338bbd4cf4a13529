"""Two result folders -> the figure, and every table in Markdown.

    python plot_results.py                                    # the published H200 and B200 -> results_plot.png
    python plot_results.py results/nvidia-h200 results/nvidia-b200 -o plot.svg
    python plot_results.py OLD NEW --tables                   # all tables to standard output, no figure
    python plot_results.py OLD NEW --table speedup --table memory    # only these
    python plot_results.py --readme README.md                 # rewrites the tables between its markers

OLD and NEW are result folders of the two boxes, or single files of them. A marker is <!-- table:speedup -->, closed by
<!-- /table:speedup -->; specifications and ceilings also take two GPUs: <!-- table:specifications B200 B300 -->, and
table:verdict is the end of should_upgrade.py's page.
The tables need no matplotlib. A price adds the cost of a token to both.

Exit codes: 0 done; 1 the file could not be written; 2 wrong use, or matplotlib is missing; 3 the boxes are not
comparable (every difference is listed); 4 nothing usable in OLD or NEW.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console

from harness import gpus
from harness.report import command, decision, tables
from harness.report.box import NothingUsable
from harness.report.reading import read_box
from harness.report.verdict_text import Page

MARKER = re.compile(r"(<!-- table:([^\n>]+?) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    try:
        boxes = read_box(args.old or command.PUBLISHED / "h200"), read_box(args.new or command.PUBLISHED / "b200")
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
            args.readme.write_text(filled(text, texts(view, found)), encoding="utf-8")
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
    except ValueError as error:  # an ending matplotlib does not write
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


def chosen(names: list[str], found: dict) -> list[str]:
    """The names given, all without any. Raises KeyError for one there is no data for."""
    for name in names:
        if name not in found:
            raise KeyError(f"no table {name!r} from these boxes; there are: {', '.join(found)}")
    return names or list(found)


def texts(view: tables.View, found: dict[str, tables.Table]) -> dict[str, str]:
    """Every table in Markdown by its name, and "verdict": the end of should_upgrade.py's page, as it prints it."""
    console = Console(file=io.StringIO(), width=110, highlight=False)
    Page(view.result, console).verdict(view.result["verdict"])
    verdict = f"```\n{console.file.getvalue().strip()}\n```\n"
    return {name: table.markdown() for name, table in found.items()} | {"verdict": verdict}


def filled(text: str, found: dict[str, str]) -> str:
    """The text with what stands between its markers replaced. Raises KeyError for a table or a GPU there is not."""

    def table(match: re.Match) -> str:
        name, *pair = match[2].split()
        if pair:
            made = {"specifications": tables.specifications, "ceilings": tables.ceilings}
            body = made[chosen([name], made)[0]](*map(gpus.by_key, pair)).markdown()
        else:
            body = found[chosen([name], found)[0]]
        return f"{match[1]}{body}{match[3]}"

    return MARKER.sub(table, text)


def parse(argv: list[str] | None) -> tuple[command.Parser, argparse.Namespace]:
    """The command line, checked; args.options is a decision.Options."""
    parser = command.Parser(__doc__)
    add = parser.add_argument
    add("-o", "--output", type=Path, default=Path("results_plot.png"), metavar="FILE", help="default: results_plot.png")
    add("--format", choices=("png", "svg", "pdf"), help="of the figure (default: by the ending of FILE)")
    add("--tables", action="store_true", help="print every table in Markdown, draw no figure")
    add("--table", action="append", default=[], metavar="NAME", help="print this one; may be repeated")
    add("--readme", type=Path, metavar="FILE", help="rewrite the tables between the markers of this file")
    args = parser.parse_args(argv)
    if args.old and not args.new:
        parser.error("NEW is missing: the result folder of the second box")
    if args.format:
        args.output = args.output.with_suffix(f".{args.format}")
    args.options = decision.Options(
        args.price_old, args.price_new, parser.price_ratio(args), allow_mismatch=args.allow_mismatch
    )
    return parser, args


if __name__ == "__main__":
    sys.exit(main())
