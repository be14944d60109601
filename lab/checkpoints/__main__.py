"""`python -m lab.checkpoints [RECIPE]`: bring a recipe's weights into the cache before the first server needs them.

`make lab` runs it. The target must come; a draft that is not there is said, since the baseline works without. FP8 drafts are left to their
first use, which takes AMD Quark some 20 seconds.
"""

from __future__ import annotations

import sys
import time

from lab.checkpoints import ensure
from lab.env import cache_dir
from lab.errors import LabError
from lab.recipes import DEFAULT, get
from lab.recipes.model import QuarkFp8


def main(name: str = DEFAULT) -> int:
    """0 when the target is ready, 1 with a sentence on stderr when it is not, 130 when interrupted."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"  … {text} ({time.monotonic() - started:.0f} s)", flush=True)

    try:
        recipe = get(name)
        ensure(recipe.target, say)
        for draft in recipe.drafts.values():
            if not isinstance(draft.weights, QuarkFp8):
                try:
                    ensure(draft, say)
                except LabError as error:
                    print(f"  ! {error}", file=sys.stderr)
    except LabError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run it again: it goes on from here.", file=sys.stderr)
        return 130
    print(f"  ✓ checkpoints of {recipe.name} in {cache_dir()} ({time.monotonic() - started:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
