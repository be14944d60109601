"""What a cell counted: the client's tokens beside the server's own, and acceptance from the server's counters.

A measured cell's server must serve nobody else: its counters tell how many requests it ended meanwhile, and a cell with other than the
client sent is a failed one. The client takes tokens from usage records. The server's counter of generated tokens over the same time holds
the warm-ups too; every warm-up is the client's first request again, so their tokens are known, and the rest must be the client's number.
Acceptance is the difference of the server's counters over the measured requests, bonus token included: 1 + accepted / drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.bench.sweep import Cell
from lab.errors import LabError
from lab.serving.metrics import Snapshot


def facts(cell: Cell, bench: Mapping[str, Any], before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Counts of one cell from the client's file and the server's counters around it. Raises `LabError` for a cell that is not whole."""
    if bench["failed"] or bench["completed"] != cell.prompts:
        why = next((text.strip().splitlines()[-1] for text in bench.get("errors", ()) if text.strip()), "The client gives no reason.")
        raise LabError(f"{bench['failed']} of {cell.prompts} requests failed.", why=why[:300])
    ended = after.finished - before.finished
    if ended and ended != cell.prompts + cell.warm_ups:
        raise LabError(
            f"The server ended {ended} requests, the client sent {cell.prompts + cell.warm_ups}.",
            why="Somebody else used it, so its speed was shared.",
            todo="Run the sweep again: this cell is measured anew.",
        )
    made = after.generation_tokens - before.generation_tokens
    warm = cell.warm_ups * bench["output_lens"][0]  # every warm-up is the first request
    difference = made - warm - bench["total_output_tokens"]
    said = "The server's counter agrees." if not difference else f"The server counted {difference:+d} tokens."
    if difference and not cell.workload.ignore_eos:
        said += " Warm-ups are counted as the first answer; where answers end by themselves, a near-tie may end one elsewhere."
    found: dict[str, Any] = {
        "completed": bench["completed"], "duration_s": bench["duration"], "warm_ups": cell.warm_ups,
        "total_input_tokens": bench["total_input_tokens"], "total_output_tokens": bench["total_output_tokens"],
        "tokens": {"client": bench["total_output_tokens"], "server": made, "warm_ups": warm, "difference": difference,
                   "agree": not difference, "said": said, "client_counts": "usage records"},
    }  # fmt: skip
    if cell.lane.draft == "none":
        return found
    if "spec_decode_num_drafts" in bench:  # the client's own reading of /metrics, without the warm-ups
        drafts, tokens, accepted = (bench[f"spec_decode_{name}"] for name in ("num_drafts", "draft_tokens", "accepted_tokens"))
        at = bench.get("spec_decode_per_position_acceptance_rates", [])
        source = "/metrics, measured requests"
    else:
        drafts, tokens = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        old = [*before.accepted_per_pos, *[0] * len(after.accepted_per_pos)]
        at = [(new - then) / drafts for new, then in zip(after.accepted_per_pos, old, strict=False)] if drafts else []
        source = "/metrics, warm-ups included"
    if not drafts:
        raise LabError("The server counted no draft.", why="This lane should speculate, so its speed would be the baseline's.")
    return found | {
        "mean_acceptance_length": 1 + accepted / drafts, "acceptance_rate": accepted / tokens if tokens else None,
        "accepted_by_position": at, "drafts": drafts, "draft_tokens": tokens, "accepted_tokens": accepted, "acceptance_source": source,
    }  # fmt: skip


def shares(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a traced companion found (`acceptance.group`), as a cell's file keeps it."""
    fresh = group["without_repeated_8grams"]
    names = ("mean_acceptance_length", "acceptance_rate", "accepted_by_position", "drafts", "accepted")
    return {
        "all_steps": {name: group[name] for name in names},
        "without_repeated_8grams": {name: fresh[name] for name in names},
        "steps_in_loops": 1 - fresh["drafts"] / group["drafts"] if group["drafts"] else None,
    }
