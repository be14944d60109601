"""Charts of one run: what became of the draft tokens, by position, by step and by the draft's own confidence, and pairs of runs."""

from __future__ import annotations

from collections.abc import Sequence

from lab.plots.base import ABOVE, PALETTES, SHARE, Chart, Kind, Theme, bar_marker, new_chart, note_on


def acceptance_by_position(accepted: Sequence[int], drafts: int, *, kind: Kind = "bf16", theme: Theme = "light") -> Chart:
    """Share of steps whose draft token at each position was accepted: `accepted[i]` of `drafts` steps accepted position i + 1."""
    shares = [count / drafts if drafts else 0.0 for count in accepted]
    said = ", ".join(f"{place}: {share:.0%}" for place, share in enumerate(shares, start=1))
    chart = new_chart(theme, x="draft position", y="accepted", summary=f"Acceptance by draft position. {said}")
    chart["layout"]["yaxis"] |= SHARE
    if not drafts:
        return note_on(chart, theme, "appears with the first draft")
    chart["layout"]["xaxis"]["dtick"] = 1
    chart["data"].append(
        {
            "type": "bar",
            "x": list(range(1, len(shares) + 1)),
            "y": shares,
            "marker": bar_marker(theme, kind),
            "customdata": [[count, drafts] for count in accepted],
            "text": [f"{share:.0%}" for share in shares],
            "hovertemplate": "position %{x}: %{customdata[0]} of %{customdata[1]} accepted<extra></extra>",
            **ABOVE,
        }
    )
    return chart


def accepted_per_step(histogram: Sequence[int], *, kind: Kind = "bf16", theme: Theme = "light") -> Chart:
    """How many steps accepted 0, 1, ... K draft tokens: `histogram[n]` steps accepted n."""
    total = sum(histogram)
    said = ", ".join(f"{place}: {count}" for place, count in enumerate(histogram))
    chart = new_chart(theme, x="draft tokens accepted in a step", y="steps", summary=f"Steps by accepted draft tokens. {said}")
    if not total:
        return note_on(chart, theme, "appears with the first draft")
    chart["layout"]["xaxis"]["dtick"] = 1
    chart["layout"]["yaxis"]["range"] = [0, max(histogram) * 1.15]
    chart["data"].append(
        {
            "type": "bar",
            "x": list(range(len(histogram))),
            "y": list(histogram),
            "marker": bar_marker(theme, kind),
            "customdata": [count / total for count in histogram],
            "text": [str(count) for count in histogram],
            "hovertemplate": "%{y} steps (%{customdata:.0%}) accepted %{x}<extra></extra>",
            **ABOVE,
        }
    )
    return chart


def confidence(pairs: Sequence[tuple[float, bool]], *, bins: int = 5, kind: Kind = "bf16", theme: Theme = "light", note: str = "") -> Chart:
    """Accepted share of draft tokens by the draft's own probability, over tokens the target decided: `(probability, accepted)` each.

    The dotted diagonal is a draft whose probability equals its chance. `note` is shown when there is nothing to draw.
    """
    counts, hits = [0] * bins, [0] * bins
    for probability, ok in pairs:
        place = min(int(probability * bins), bins - 1)
        counts[place] += 1
        hits[place] += ok
    shares = [hit / count if count else 0.0 for hit, count in zip(hits, counts, strict=True)]
    centres = [(place + 0.5) / bins for place in range(bins)]
    said = ", ".join(f"around {c:.1f}: {s:.0%} of {n}" for c, s, n in zip(centres, shares, counts, strict=True) if n)
    chart = new_chart(theme, x="draft's own probability", y="accepted", summary=f"Acceptance by draft confidence. {said}")
    chart["layout"]["yaxis"] |= SHARE
    chart["layout"]["xaxis"] |= {"range": [0, 1], "tickvals": [0, 0.2, 0.4, 0.6, 0.8, 1]}
    if not pairs:
        return note_on(chart, theme, note or "appears with the first draft")
    chart["data"] += [
        {
            "type": "bar",
            "x": centres,
            "y": shares,
            "width": 0.8 / bins,
            "marker": bar_marker(theme, kind),
            "customdata": [[hit, count] for hit, count in zip(hits, counts, strict=True)],
            "hovertemplate": "%{customdata[0]} of %{customdata[1]} accepted<extra></extra>",
        },
        {
            "type": "scatter",
            "x": [0, 1],
            "y": [0, 1],
            "mode": "lines",
            "line": {"color": PALETTES[theme]["muted"], "dash": "dot", "width": 1},
            "hoverinfo": "skip",
        },
    ]
    return chart


def speed_ups(pairs: Sequence[tuple[float, float]], *, kind: Kind = "bf16", theme: Theme = "light") -> Chart:
    """Output tokens per second of each pair of runs, baseline beside draft lane: `(baseline, draft)` each, in the order they were run."""
    ratios = [draft / baseline if baseline else 0.0 for baseline, draft in pairs]
    said = ", ".join(f"pair {number}: {ratio:.2f} times" for number, ratio in enumerate(ratios, start=1))
    chart = new_chart(theme, x="pair of runs", y="output tok/s", summary=f"Speed of pairs of runs. {said}")
    if not pairs:
        return note_on(chart, theme, "appears with the first pair")
    numbers = list(range(1, len(pairs) + 1))
    layout = chart["layout"]
    layout["xaxis"] |= {"tickmode": "array", "tickvals": numbers}
    layout["yaxis"]["range"] = [0, max(max(pair) for pair in pairs) * 1.2]
    layout |= {"barmode": "group", "bargap": 0.3 if len(pairs) > 2 else 0.6}
    kinds: tuple[Kind, Kind] = ("none", kind)
    for lane, (name, one) in enumerate(zip(("baseline", "Eagle3"), kinds, strict=True)):
        bars = {
            "type": "bar",
            "name": name,
            "x": numbers,
            "y": [pair[lane] for pair in pairs],
            "marker": bar_marker(theme, one),
            "hovertemplate": "%{y:.1f} tok/s<extra>%{fullData.name}</extra>",
        }
        chart["data"].append(bars | ({"text": [f"{ratio:.2f}×" for ratio in ratios], **ABOVE} if lane else {}))
    return chart
