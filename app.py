"""Eagle3 Lab: parse the flags, build the page, serve it on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import sys

from lab import recipes
from lab.errors import LabError


def main() -> int:
    parser = argparse.ArgumentParser(description="Eagle3 Lab: watch a real vLLM engine speculate.")
    parser.add_argument("--recipe", help=f"one of: {', '.join(sorted(recipes.RECIPES))} (default: {recipes.DEFAULT})")
    parser.add_argument("--attach", action="append", default=[], metavar="LANE=URL", help="a server that runs elsewhere, or a file")
    parser.add_argument("--port", type=int, default=7860, help="port on 127.0.0.1 (the next free one if it is taken)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    arguments = parser.parse_args()
    try:
        from lab.serving.attach import chosen
        from lab.ui import build

        recipe, servers = chosen(arguments.recipe, arguments.attach)
        build.run(recipe, port=arguments.port, open_browser=arguments.open, addresses=servers)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
