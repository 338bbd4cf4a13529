"""Two result folders -> the figure, and every table in Markdown.

    python plot_results.py                                    # the published H200 and B200 -> results_plot.png
    python plot_results.py results/nvidia-h200 results/nvidia-b200 -o plot.svg
    python plot_results.py H100 B200 --price-ratio 2.2        # GPUs by name: what others measured on both
    python plot_results.py OLD NEW --tables                   # all tables to standard output, no figure
    python plot_results.py OLD NEW --table speedup --table memory    # only these
    python plot_results.py --fill docs/worked-example.md      # rewrites the tables between the markers of a page

OLD and NEW are result folders of the two boxes, single files of them, logs of another trainer, or names of GPUs.
A marker is <!-- table:speedup -->, closed by
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
from harness.report import command, companions, decision, tables
from harness.report.box import NothingUsable
from harness.report.reading import read_box
from harness.report.verdict_text import Page

MARKER = re.compile(r"(<!-- table:([^\n>]+?) -->\n).*?(<!-- /table:\2 -->)", re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    parser, args = parse(argv)
    try:
        view = asked(args)
    except NothingUsable as error:
        print(error, file=sys.stderr)
        return 4
    except ValueError as error:
        parser.error(str(error))
    for problem in view.result["question"]["problems"]:
        print(problem, file=sys.stderr)
    found, compared = texts(view), view.result.get("comparable")
    if not found or (view.pair and "speed" not in view.result):
        reasons = compared["never"] + compared["differences"] or ["no figures of the same kind"]
        hint = "; --allow-mismatch goes on all the same" if found and not compared["never"] else ""
        print(f"not comparable: {'; '.join(reasons)}{hint}", file=sys.stderr)
        return 3
    try:
        if args.fill:
            for page in args.fill:
                page.write_text(filled(page.read_text(encoding="utf-8"), found), encoding="utf-8")
                print(page)
        elif args.tables or args.table:
            names = args.table or [name for name in found if name != "verdict"]
            print("\n".join(pick(name, found) for name in names), end="")
        else:
            from harness.report import figure

            by_name = "published" in view.result
            figure.save(figure.draw_pairs(view.result) if by_name else figure.draw(view), args.output)
            print(args.output)
    except ImportError as error:
        parser.error(f"{error}: pip install matplotlib, or --tables, which needs none")
    except KeyError as error:  # a table or a GPU there is not
        parser.error(error.args[0])
    except ValueError as error:  # an ending matplotlib does not write
        parser.error(str(error))
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def asked(args: argparse.Namespace) -> tables.View:
    """Two boxes, or what others measured on two GPUs. Raises NothingUsable."""
    if args.gpus_by_name:
        return tables.view_by_name(*args.gpus_by_name, args.options)
    old = read_box(args.old or command.PUBLISHED / "h200", args.old_facts)
    return tables.view(old, read_box(args.new or command.PUBLISHED / "b200", args.new_facts), args.options)


def texts(view: tables.View) -> dict[str, str]:
    """Every table in Markdown by its name, and "verdict": the end of should_upgrade.py's page, as it prints it."""
    found = {name: table.markdown() for name, table in tables.make(view).items()}
    if "verdict" in view.result:
        console = Console(file=io.StringIO(), width=110, highlight=False)
        Page(view.result, console).verdict(view.result["verdict"])
        found["verdict"] = f"```\n{console.file.getvalue().strip()}\n```\n"
    return found


def pick(name: str, found: dict):
    """Raises KeyError with what there is instead."""
    if name not in found:
        raise KeyError(f"no table {name!r} from these boxes; there are: {', '.join(found)}")
    return found[name]


def filled(text: str, found: dict[str, str]) -> str:
    """The text with what stands between its markers replaced. Raises KeyError for a table or a GPU there is not."""

    def table(match: re.Match) -> str:
        name, *pair = match[2].split()
        if pair:
            made = pick(name, {"specifications": companions.specifications, "ceilings": companions.ceilings})
            return f"{match[1]}{made(*map(gpus.by_key, pair)).markdown()}{match[3]}"
        return f"{match[1]}{pick(name, found)}{match[3]}"

    return MARKER.sub(table, text)


def parse(argv: list[str] | None) -> tuple[command.Parser, argparse.Namespace]:
    """The command line, checked; args.options is a decision.Options."""
    parser = command.Parser(__doc__)
    add = parser.add_argument
    add("-o", "--output", type=Path, default=Path("results_plot.png"), metavar="FILE", help="default: results_plot.png")
    add("--format", choices=("png", "svg", "pdf"), help="of the figure (default: by the ending of FILE)")
    add("--tables", action="store_true", help="print every table in Markdown, draw no figure")
    add("--table", action="append", default=[], metavar="NAME", help="print this one; may be repeated")
    add("--fill", action="append", type=Path, metavar="PAGE", help="rewrite the tables between this page's markers")
    args = parser.parse_args(argv)
    args.gpus_by_name = parser.two_gpus(args)
    if args.old and not args.new:
        parser.error("NEW is missing: the result folder of the second box")
    if args.format:
        args.output = args.output.with_suffix(f".{args.format}")
    prices = args.price_old, args.price_new, parser.price_ratio(args)
    args.options = decision.Options(*prices, allow_mismatch=args.allow_mismatch)
    return parser, args


if __name__ == "__main__":
    sys.exit(main())
