"""A duel's report as text for a terminal."""

from __future__ import annotations

from typing import Any

from lab.bench import result


def number(found: dict[str, Any] | None, which: str, digits: int = 2, percent: bool = False) -> str:
    """One side's value of a measure (`which`: "one" or "other"), or a dash."""
    if found is None:
        return "–"
    return f"{found[which]:.1%}" if percent else f"{found[which]:.{digits}f}"


def change(found: dict[str, Any] | None, digits: int = 2, percent: bool = False) -> str:
    """The difference with its interval; in percentage points (pp) for shares."""
    if found is None:
        return "–"
    scale, unit = (100, " pp") if percent else (1, "")
    digits = 1 if percent else digits
    text = f"{scale * found['difference']:+.{digits}f}"
    if found["low"] is not None:
        text += f" [{scale * found['low']:+.{digits}f}, {scale * found['high']:+.{digits}f}]"
    return text + unit


def rows(comparison: dict[str, Any]) -> list[list[str]]:
    """Measure, both values and the difference: the table that terminal, page and export share."""
    table = [
        [
            "mean acceptance length (with bonus)",
            number(comparison["mean_acceptance_length"], "one"),
            number(comparison["mean_acceptance_length"], "other"),
            change(comparison["mean_acceptance_length"]),
        ],
        [
            "acceptance rate",
            number(comparison["acceptance_rate"], "one", percent=True),
            number(comparison["acceptance_rate"], "other", percent=True),
            change(comparison["acceptance_rate"], percent=True),
        ],
    ]
    for place, found in enumerate(comparison["accepted_by_position"], start=1):
        table.append(
            [
                f"accepted at position {place}",
                number(found, "one", percent=True),
                number(found, "other", percent=True),
                change(found, percent=True),
            ]
        )
    speed = comparison["output_tokens_per_second"]
    table.append(["output tok/s", number(speed, "one", 1), number(speed, "other", 1), change(speed, 1)])
    return table


def places(comparison: dict[str, Any]) -> str:
    """How many places of the answers fared differently, in words."""
    one, other, count = comparison["one"], comparison["other"], comparison["places"]
    return (
        f"Of {sum(count.values())} common places: {count['both']} accepted from both, {count['one']} only from {one}, "
        f"{count['other']} only from {other}, {count['neither']} from neither; at {count['apart'] + count['alone']} "
        "at least one had no draft token."
    )


def overview(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of one table over all drafts: length, its difference from the first draft, and acceptance by position."""
    comparisons = report["comparisons"]
    wide = max(len(comparison["accepted_by_position"]) for comparison in comparisons)
    header = ["draft", "mean acceptance length", "difference", *(f"position {place}" for place in range(1, wide + 1))]

    def row(comparison: dict[str, Any], which: str) -> list[str]:
        length = comparison["mean_acceptance_length"]
        by_position = [number(found, which, percent=True) for found in comparison["accepted_by_position"]]
        return [comparison[which], number(length, which), change(length) if which == "other" else "", *by_position]

    return header, [row(comparisons[0], "one"), *(row(comparison, "other") for comparison in comparisons)]


def conditions(setting: dict[str, Any]) -> list[str]:
    """What the answers were asked with, in words. A recording may not say it, or hold several."""

    def several(value: Any) -> str:
        return " and ".join(map(str, value)) if isinstance(value, list) else str(value)

    temperature, tokens = setting["temperature"], setting["max_tokens"]
    sampling = "greedy" if temperature == 0 else f"temperature {'not known' if temperature is None else several(temperature)}"
    return [
        f"K={several(setting['k'])}" if setting["k"] is not None else "K not known",
        str(setting["mode"] or "mode not known"),
        sampling,
        f"up to {several(tokens)} new tokens" if tokens is not None else "new tokens not known",
        f"{setting['prompts']} prompt{'' if setting['prompts'] == 1 else 's'}",
    ]


def render(report: dict[str, Any]) -> str:
    """The whole report: for each comparison the sentence, the table, the places and the warnings."""
    setting = report["setting"]
    text = [f"{', '.join(conditions(setting))}; [95% paired bootstrap interval over prompts]"]
    text += [f"One setting for all: {each}." for each in setting["changed"]]
    if len(report["comparisons"]) > 1:
        text += ["", result.table(*overview(report))]
    for comparison in report["comparisons"]:
        header = ["measure", comparison["one"], comparison["other"], "difference"]
        text += ["", comparison["sentence"], "", result.table(header, rows(comparison)), "", places(comparison)]
        text += [f"! {warning}" for warning in comparison["warnings"]]
    text += ["", *report["notes"]] if report["notes"] else []
    return "\n".join(text)
