"""Model cards: of a trained draft, a README with what it is, how it was made and what it measures, and its curves as an SVG; and of a
target converted to MLA, what the conversion costs.

Everything in it is read from files: the run's `plan.json`, `provenance.json` and `log.jsonl`, and results of `eagle3-lab bench
acceptance`. Nothing is typed in, except the notes on what helped, which are a file too (`NOTES.md` beside the card, if there is one).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lab import provenance
from lab.errors import LabError

WIDTH, HEIGHT, MARGIN = 640, 240, 46
COLOURS = ("#0072B2", "#B35900", "#00694B", "#5F6670")
DASHES = ("", "7 4", "2 3", "9 3 2 3")

Line = tuple[str, Sequence[tuple[float, float]]]


def panel(title: str, unit: str, lines: Sequence[Line], top: int) -> str:
    """One chart as SVG elements: named lines over training tokens in millions; each has a colour, a dash and its points marked."""
    points = [point for _, values in lines for point in values]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    pad = (high - low) * 0.08 or 0.1
    low, high = low - pad, high + pad

    def place(x: float, y: float) -> tuple[float, float]:
        wide, tall = WIDTH - 2 * MARGIN - 90, HEIGHT - 2 * MARGIN
        return MARGIN + x / right * wide, top + HEIGHT - MARGIN - (y - low) / (high - low) * tall

    parts = [f'<text x="{MARGIN}" y="{top + 24}" font-weight="bold">{escape(title)} ({escape(unit)})</text>']
    for step in range(5):
        value = low + (high - low) * step / 4
        left, height = place(0, value)
        end, _ = place(right, value)
        parts.append(f'<line x1="{left:.1f}" y1="{height:.1f}" x2="{end:.1f}" y2="{height:.1f}" stroke="#8888" stroke-width="0.5"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{height + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        x, bottom = place(right * step / 4, low)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{right * step / 4:.0f}</text>')
    for index, (name, values) in enumerate(lines):
        colour, dash = COLOURS[index % 4], DASHES[index % 4]
        spots = [place(x, y) for x, y in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"/>')
        if len(spots) <= 60:
            parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in spots)
        x, y = WIDTH - MARGIN - 78, top + MARGIN + 18 * index
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts.append(f'<text x="{x + 32}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join(parts)


def curves(log: Sequence[dict[str, Any]]) -> str:
    """The run's losses, and the replayed acceptance lengths on held-out rows, over training tokens, as an SVG document."""

    def series(pick: Any) -> list[tuple[float, float]]:
        return [(record["tokens"] / 1e6, value) for record in log if (value := pick(record)) is not None]

    steps = max((len(record.get("loss", ())) for record in log), default=0)
    losses = [(f"step {step + 1}", series(lambda r, step=step: r["loss"][step] if "loss" in r else None)) for step in range(steps)]
    corpora = sorted({name for record in log for name, value in record.items() if isinstance(value, dict)})
    lengths = [(name, series(lambda r, name=name: r.get(name, {}).get("length_k3"))) for name in corpora]
    body = panel("Loss of each unrolled step", "nats, over million tokens", losses, 0)
    body += panel("Mean acceptance length at K=3", "replay on held-out rows, bonus included", lengths, HEIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * HEIGHT}" font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{WIDTH}" height="{2 * HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of `log.jsonl`; of a step that stands twice (a resumed run), the later one."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise LabError(f"The training log {path} cannot be read.", why=str(error)) from error
    return sorted({record["step"]: record for record in records}.values(), key=lambda record: record["step"])


def acceptance_table(result: dict[str, Any]) -> str:
    """A Markdown table of a result of `eagle3-lab bench acceptance`."""
    groups = {"overall": result["overall"], **result["kinds"]}
    groups |= {f"context {name}": group for name, group in result["contexts"].items()}
    lines = ["| prompts | number | mean acceptance length [95%] | without loops [95%] | accepted at position |", "|---|---|---|---|---|"]

    def interval(group: dict[str, Any]) -> str:
        found = group["mean_acceptance_length"]
        return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"

    for name, group in groups.items():
        positions = " ".join(f"{share:.2f}" for share in group["accepted_by_position"])
        lines.append(f"| {name} | {group['prompts']} | {interval(group)} | {interval(group['without_repeated_8grams'])} | {positions} |")
    return "\n".join(lines)


def earlier(origin: dict[str, Any]) -> str:
    """A line on the draft that a run went on from, if it did."""
    if "start" not in origin:
        return ""
    plan = (origin["start"]["provenance"] or {}).get("plan")  # not every draft was trained here
    seen = f", trained on {plan['steps'] * plan['tokens'] / 1e6:,.0f} million tokens" if plan else ""
    return f"It went on from an earlier draft (SHA-256 {origin['start']['sha256'][:16]}…{seen}).\n"


def converted(origin: dict[str, Any]) -> str:
    """Which conversion to MLA the target went through, if it did."""
    if "mla" not in origin:
        return ""
    made = origin["mla"]
    return f",\nwhich is {origin['target']} converted to MLA by `{made['recipe']}` (SHA-256 {made['sha256'][:16]}…)"


def write_card(folder: Path, title: str) -> Path:
    """Write `training.svg` and `README.md` into a draft's `folder` from the files there; returns the card's path."""
    origin = json.loads((folder / "provenance.json").read_text())
    log = read_log(folder / "log.jsonl")
    plan, config = origin["plan"], json.loads((folder / "config.json").read_text())
    provenance.write_text(folder / "training.svg", curves(log))
    last = log[-1]
    size = (folder / "model.safetensors").stat().st_size
    layers = config["eagle_aux_hidden_state_layer_ids"]
    seen, written = last["tokens"] / 1e6, origin["corpus_tokens"] / 1e6
    writer = f"the target itself{converted(origin)}"
    parts = [
        f"# {title}",
        f"An Eagle3 draft of one Llama layer, {size / 1e6:.1f} MB in BF16, trained by this project with `eagle3-lab train`. Apache-2.0.",
        "## Shape",
        f"- Features: the inputs of the target's layers {layers}{' (low, middle, high)' if len(layers) == 3 else ''}, joined by `fc`.\n"
        f"- Draft vocabulary: {config['draft_vocab_size']:,} of {config['vocab_size']:,} tokens, the most frequent in the target's\n"
        f"  answers; they cover {origin['coverage']:.1%} of the corpus's answer tokens.\n"
        f"- Feed-forward width {config['intermediate_size']:,}. Token embeddings are the target's own and are not stored.",
        "## Training",
        f"{last['step']:,} steps of {plan['tokens']:,} tokens: {seen:,.0f} million seen, of {written:,.0f} million in the corpus, in\n"
        f"{last['seconds'] / 60:.1f} minutes on {origin['device']}. Training-time test over {plan['unroll']} steps, seed {plan['seed']}.\n"
        f"{earlier(origin)}The corpus was written by {writer}; no prompt of `assets/prompts` is in it.",
        "![Loss and acceptance over training](training.svg)",
    ]
    if (folder / "acceptance.json").exists():
        result = json.loads((folder / "acceptance.json").read_text())
        made, settings = result["provenance"], result["provenance"]["settings"]
        machine = provenance.processor(made["hardware"])
        how = (
            f"`eagle3-lab bench acceptance`, {made['made'][:10]}, lane `{made['lanes'][0]}`, greedy, {settings['max_tokens']} new tokens,\n"
            f"end of sequence respected, {machine}. The mean acceptance length counts the bonus token; intervals are bootstraps over\n"
            'prompts; "without loops" leaves out steps that repeat an earlier 8-gram of the same answer.'
        )
        parts += ["## Measured in the engine", how, acceptance_table(result)]
    if (folder / "NOTES.md").exists():
        parts.append((folder / "NOTES.md").read_text().strip())
    parts += ["## Provenance", "```json\n" + json.dumps({k: v for k, v in origin.items() if k != "plan"}, indent=1) + "\n```"]
    card = folder / "README.md"
    provenance.write_text(card, "\n\n".join(parts) + "\n")
    return card


def whole_healing(made: dict[str, Any]) -> str:
    """What the card of a recipe says of healing the whole model."""
    plan, (_, first), (_, last) = made["plan"], made["curve"][0], made["curve"][-1]
    texts = " and ".join(f"{rows:,} rows of {length:,} tokens" for rows, length in made["rows"])
    kept = " and ".join(f"{was:.4f} before and {now:.4f} after" for was, now in zip(first, last, strict=True))
    return (
        f"Then all corrections together, with {plan['rank']} components each, kept in 8 bits: {made['steps']:,} steps of\n"
        f"{plan['tokens']:,} tokens in {made['seconds'] / 60:.1f} minutes on {made['device']}; loss: KL, softened, from the original\n"
        f"at every token, on {texts} that the original wrote.\n"
        f"On rows held out of each, in BF16: {kept} (KL, nats)."
    )


def write_mla_card(recipe: Path) -> Path:
    """Write `README.md` beside a conversion's recipe (a file of `eagle3-lab train mla`) from what the file says of itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(recipe, "pt") as file:
            origin = json.loads((file.metadata() or {}).get("eagle3_lab", "null"))
    except (SafetensorError, ValueError) as error:
        raise LabError(f"{recipe} is no conversion recipe.", why=f"{type(error).__name__}: {error}.") from error
    if not origin or "mla-test" not in origin:
        raise LabError(f"{recipe} does not say how it was measured.", todo="Make it with: eagle3-lab train mla")
    short, long = (origin["texts"][name]["length"] for name in ("mla-test", "mla-long"))
    rows = [("converted, not healed", origin["conversion"], short)] if "heal" in origin else []
    state = "converted and healed" if "heal" in origin else "converted, not healed"
    before = origin.get("start", {}).get("whole", [])  # of the recipe that this one began with, if it was healed as a whole already
    wholes = [*before, *([origin["whole"]] if "whole" in origin else ())]
    if "whole" in origin:
        rows.append(("the recipe that it began with" if before else "converted, healed layer by layer", origin["whole"]["before"], short))
    if wholes:
        state += " as a whole"
    rows += [(state, origin["mla-test"], short), (state, origin["mla-long"], long)]
    names = ("model", "contexts to", "held-out tokens", "top-1 agreement", "KL, nats", "loss of the original", "its own loss")
    table = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    table += [
        f"| {name} | {length:,} | {found['tokens']:,.0f} | {found['top1_agreement']:.1%} | {found['kl_nats']:.4f} "
        f"| {found['loss_original']:.3f} | {found['loss_converted']:.3f} |"
        for name, found, length in rows
    ]
    size = recipe.stat().st_size / 1e6
    healers = "`lab/train/heal.py` and `heal_whole.py`" if wholes else "`lab/train/heal.py`"
    parts = [
        f"# {origin['target']} in MLA form",
        f"The recipe (`{recipe.name}`, {size:.1f} MB) that turns {origin['target']} into a model of DeepSeek-V3's architecture\n"
        "with multi-head latent attention, which Kimi-K2.5 has, too. The lab merges it with the original's weights on first use.\n"
        f"`lab/train/mla.py` says how it converts, {healers} how it heals. Apache-2.0, as the original.",
        "It is *a* small MLA model made from the original, not the original: greedy answers soon part from it.",
        "## Losses",
        "On text that the original wrote and this recipe never saw: agreement with the original's first choice, KL from its\n"
        "distribution to the converted model's, and how well each predicts the text.",
        "\n".join(table),
    ]
    if "heal" in origin:
        plan, (count, length), errors = origin["heal"], origin["rows"], origin["layer_errors"]
        first, last = (sum(both[side] for both in errors) / len(errors) for side in (0, 1))
        parts += [
            "## Healing",
            f"A correction of rank {plan['rank']} for each projection of each layer, {plan['steps']} steps of {plan['rows']} rows each,\n"
            f"on {count:,} rows of {length:,} tokens that the original wrote, on {origin['device']}. Mean relative error of the residual\n"
            f"stream after a layer's attention, on held-out rows: {first:.2e} before the layer's correction, {last:.2e} with it.",
        ]
    parts += [whole_healing(made) for made in wholes]
    shown = {key: value for key, value in origin.items() if key != "layer_errors"}
    parts += ["## Provenance", "```json\n" + json.dumps(shown, indent=1) + "\n```"]
    card = recipe.with_name("README.md")
    provenance.write_text(card, "\n\n".join(parts) + "\n")
    return card
