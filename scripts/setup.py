"""Set up a checkout: virtual environment, locked packages, the project itself, and (asked for) a browser and the checkpoints.

Every step looks first at what is there and does only what is missing, so it can be interrupted at any point and run again. Needs Python
3.11 and nothing but the standard library; `machine.py` says what the machine must have, `packages.py` installs.

Limits: Linux on x86-64 or ARM64 (the engine's wheels). Elsewhere it says what works, and stops.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from machine import ROOT, SetupError, check_library, check_platform
from packages import LOG, PIP, VENV, Display, ensure_packages, environment, explain, python, run, site_packages, whole

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_PACKAGES = ("chromium", "fonts-noto-color-emoji")


def ensure_venv(display: Display) -> tuple[int, ...]:
    """Make `.venv`, or make it again when its Python or pip does not run. Returns its Python's version."""
    display.begin("Python environment")
    probe = [python(), "-c", "import sys, pip; print(*sys.version_info[:3])"]
    for attempt in ("found", "made"):
        result = subprocess.run(probe, capture_output=True, text=True, env=environment()) if Path(python()).exists() else None
        version = tuple(int(part) for part in result.stdout.split()) if result and result.returncode == 0 else ()
        if (3, 11) <= version[:2] <= (3, 13):
            display.end(f"Python {'.'.join(map(str, version))} in .venv, {attempt}")
            return version
        if attempt == "made":
            break
        if VENV.exists():
            display.update("removing an environment that does not work", force=True)
            shutil.rmtree(VENV)
        display.update("making .venv", force=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, env=environment())
        if made.returncode:
            raise SetupError(f"Python could not make a virtual environment in {VENV}: {(made.stderr or made.stdout).strip()[-400:]}")
    raise SetupError(
        f"The new virtual environment in {VENV} does not run. Name another Python and try again: make lab PYTHON=/path/to/python3"
    )


def ensure_project(display: Display) -> None:
    """Install this checkout as an editable package; again only when what that depends on changed."""
    site, stamp = site_packages(), VENV / "project.sha256"
    sources = [str(ROOT).encode(), *((ROOT / name).read_bytes() for name in ("pyproject.toml", "lab/__init__.py"))]
    digest = hashlib.sha256(b"\0".join(sources)).hexdigest()
    infos = list(site.glob("eagle3_lab-*.dist-info"))
    if len(infos) == 1 and whole(infos[0]) and stamp.exists() and stamp.read_text(encoding="ascii") == digest:
        return
    for info in infos:
        if not whole(info):
            shutil.rmtree(info)
    display.begin("Eagle3 Lab itself")
    command = [python(), *PIP, "--no-build-isolation", "--editable", "."]
    status, output = run(command, lambda _: display.update("Eagle3 Lab itself"))
    if status:
        raise explain(output, "Eagle3 Lab itself")
    stamp.write_text(digest, encoding="ascii")
    display.end("Eagle3 Lab itself, as an editable package")


def ensure_browser(display: Display) -> None:
    """A Chromium for the page's tests: from Debian where this user may install packages, else the command to type."""
    if any(map(shutil.which, BROWSERS)):
        return
    by_hand = f"sudo apt-get install {' '.join(BROWSER_PACKAGES)}"
    prefix: list[str] | None = [] if os.geteuid() == 0 else None
    if prefix is None and shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        prefix = ["sudo", "-n"]
    if prefix is None or not shutil.which("apt-get"):
        print(f"  ! The page's tests need Chromium, and this user may not install it. On Debian: {by_hand}", flush=True)
        return
    display.begin("Chromium for the page's tests")
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300", "-q", "-y"]
    for step in ([*apt, "update"], [*apt, "install", "--no-install-recommends", *BROWSER_PACKAGES]):
        status, _ = run(step, lambda line: display.update(f"Chromium: {line.strip()[:80]}") if line.strip() else None)
    if status or not any(map(shutil.which, BROWSERS)):
        raise SetupError(f"apt could not install Chromium (log: {LOG.relative_to(ROOT)}). Install it by hand and run this again: {by_hand}")
    display.end("Chromium for the page's tests")


def ensure_checkpoints() -> None:
    """Bring the default recipe's weights into the cache; `lab.checkpoints` shows its own progress and says what went wrong."""
    if subprocess.run([python(), "-m", "lab.checkpoints"], env=environment(), cwd=ROOT).returncode:
        raise SetupError("The checkpoints are not ready (see above). Run this again when that is mended: it goes on from here.")


def main() -> int:
    """Parse the command line and take the steps in order. 0, 1 with a sentence on stderr, or 130 when interrupted."""
    parser = argparse.ArgumentParser(description="Set up this checkout of Eagle3 Lab.")
    parser.add_argument("--dev", action="store_true", help="also what tests and notebooks need")
    parser.add_argument("--browser", action="store_true", help="also a Chromium for the page's tests")
    parser.add_argument("--no-checkpoints", action="store_true", help="leave the checkpoints to their first use")
    options = parser.parse_args()
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.default_int_handler)
    display = Display()
    try:
        check_platform()
        check_library()
        import fcntl  # absent on Windows, which stopped above

        with (ROOT / "requirements" / "lab.lock").open(encoding="utf-8") as handle:
            os.set_inheritable(handle.fileno(), True)  # a pip that outlives this process keeps the lock
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("  … another setup is running in this checkout: waiting for it", flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
            version = ensure_venv(display)
            ensure_packages(["lab.lock", "dev.lock"] if options.dev else ["lab.lock"], version, display)
            ensure_project(display)
            if options.browser:
                ensure_browser(display)
        if not options.no_checkpoints:
            ensure_checkpoints()
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nSetup stopped: {error}. Run it again when that is mended: it goes on from here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run it again: it goes on from here.", file=sys.stderr)
        return 130
    print(f"  ✓ set up in {time.monotonic() - display.started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
