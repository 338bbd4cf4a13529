"""What the report's scripts ask for alike: two boxes, their prices, and errors of one line."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from harness import gpus
from harness.gpus import Gpu
from harness.report import cost

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published"
PUBLISHED_PRICE_RATIO = 2.0  # what the published guide reckons with; the default for its two boxes only


class Parser(argparse.ArgumentParser):
    """OLD, NEW, prices and --allow-mismatch; `doc` is the script's docstring. A wrong use is one line."""

    def __init__(self, doc: str):
        usage, _, details = doc.partition("\n")
        super().__init__(description=usage, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter)
        price = checked(cost.positive)
        self.add_argument("old", nargs="?", metavar="OLD", help="box you have: folder or log (default: published H200)")
        self.add_argument("new", nargs="?", metavar="NEW", help="box to weigh: folder or log (default: published B200)")
        for side in ("old", "new"):
            text = f"what {side.upper()}, another trainer's log, does not say: gpus=8, seq_len=8192; repeatable"
            self.add_argument(f"--{side}", dest=f"{side}_facts", action="append", default=[], metavar="K=V", help=text)
        self.add_argument("--price-old", type=price, metavar="X", help="per GPU and hour")
        self.add_argument("--price-new", type=price, metavar="Y", help="per GPU and hour")
        self.add_argument("--price-ratio", type=price, metavar="R", help="new price / old price, if only that is known")
        self.add_argument("--allow-mismatch", action="store_true", help="go on although the boxes are not comparable")

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help tells more\n")

    def two_gpus(self, args: argparse.Namespace) -> tuple[Gpu, Gpu] | None:
        """OLD and NEW as GPUs by name, where neither is a file or folder; null: they are to be read."""
        if args.old and args.new and not Path(args.old).exists() and not Path(args.new).exists():
            with contextlib.suppress(KeyError):  # reading says that there is no such folder
                return gpus.by_key(args.old), gpus.by_key(args.new)
        return None

    def price_ratio(self, args: argparse.Namespace) -> float | None:
        """Of the command line, or the published one for the published boxes. Ends the script if prices contradict."""
        if (args.price_old is None) != (args.price_new is None):
            self.error("--price-old and --price-new go together")
        if args.price_old and args.price_ratio:
            self.error("--price-ratio is one way to say it, --price-old and --price-new the other: give one")
        return args.price_ratio if args.old or args.price_old or args.price_ratio else PUBLISHED_PRICE_RATIO


def checked(convert):
    """`convert` as an argparse type: argparse shows the text of an ArgumentTypeError, and only of that."""

    def convert_or_say(text: str):
        try:
            return convert(text)
        except (ValueError, KeyError) as error:
            raise argparse.ArgumentTypeError(error.args[0]) from None

    return convert_or_say
