"""Is a draft's lane lossless? Its answers against the target's, greedy and at a temperature, into a certificate.

Greedy: the baseline answers every prompt at concurrency 1 and higher, reading its margins; the same answers are then scored by the
baseline in one pass each. From these readings comes the threshold (`divergence.py`), so it is the target's own noise on this machine.
The draft's lane answers the same prompts at the same concurrencies, undisturbed (no probabilities are asked of it, since that would take
another path through the sampler), and the baseline scores every token it wrote. Above temperature 0: `sampled.py`.

The reference is vLLM without the plugin (`reference`), with one more argument that lets it tell more probabilities. Verdicts: `lossless`
where every answer is identical or parts at a near-tie and no test rejects, `not lossless` where one does, `undecided` where the baseline's
own margins move by more than `divergence.MOST`. A certificate covers the prompts that it names, no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lab.bench import divergence, result, sampled
from lab.bench.divergence import Judged, Noise, nats
from lab.bench.prompts import Prompt
from lab.bench.scoring import Asker, Completion, Scored, in_flight
from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.command import Lane

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to verify: greedy `prompts` at each of `concurrency`, and `samples` answers to each of the first `sample_prompts` of them."""

    prompts: tuple[Prompt, ...]
    concurrency: tuple[int, ...] = (1, 4)
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.7, 1.0)
    samples: int = 512
    sample_prompts: int = 4

    def __post_init__(self) -> None:
        if not self.prompts:
            raise LabError("There are no prompts to verify with.")
        if not self.concurrency or min(self.concurrency) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise LabError("Concurrencies must be different numbers of at least 1.", todo="For example: --concurrency 1 --concurrency 4")
        if self.max_tokens < 2:
            raise LabError("An answer needs at least 2 tokens.", why="The first one comes from prefill and proves nothing.")
        for temperature in self.temperatures:
            if not 0 < temperature <= 1:
                raise LabError(
                    f"The distribution cannot be tested at temperature {temperature:g}.",
                    why="The reference's probabilities are turned to the temperature with a bound that holds above 0 and up to 1.",
                )
        if self.temperatures and self.samples < 2 * sampled.LEAST:
            raise LabError(
                f"{self.samples} answers to a prompt are too few to test a distribution.", todo=f"Take at least {2 * sampled.LEAST}."
            )


def reference(recipe: Recipe, *, compiled: bool = False) -> Lane:
    """The lane that judges: the recipe's baseline without the plugin, which may tell `sampled.TOP` probabilities."""
    flags = (*recipe.flags, ("--max-logprobs", str(sampled.TOP)))
    return Lane(replace(recipe, name=f"{recipe.name}-reference", flags=flags, drafts={}), compiled=compiled, traced=False)


def with_dtype(recipe: Recipe, dtype: str | None) -> Recipe:
    """The recipe computing in `dtype` ("float32", ...); the recipe itself for None. In float32 near-ties are all but impossible."""
    if dtype is None:
        return recipe
    flags = (*((flag, value) for flag, value in recipe.flags if flag != "--dtype"), ("--dtype", dtype))
    changed = replace(recipe, name=f"{recipe.name}-{dtype}", flags=flags)
    return replace(changed, memory_bytes=recipe.memory_bytes + ((600 << 20) if changed.value_bytes > recipe.value_bytes else 0))


@dataclass(frozen=True)
class Baseline:
    """The target's answers and its own view of them, by concurrency; `ids` are the prompts'."""

    ids: Mapping[str, tuple[int, ...]]
    answers: Mapping[int, tuple[Completion, ...]]
    scored: Mapping[int, tuple[list[Scored], ...]]
    noise: Noise


async def ask_baseline(asker: Asker, plan: Plan, say: Say) -> Baseline:
    """The baseline's greedy answers at each concurrency, scored, and how much its margins move."""
    ids = {prompt.id: await asker.tokens(prompt.text) for prompt in plan.prompts}
    answers: dict[int, tuple[Completion, ...]] = {}
    scored: dict[int, tuple[list[Scored], ...]] = {}
    for at_once in plan.concurrency:
        say(f"Baseline: {len(ids)} answers at concurrency {at_once}")

        async def ask(prompt: tuple[int, ...]) -> Completion:
            return (await asker.complete(prompt, max_tokens=plan.max_tokens, top=2))[0]

        answers[at_once] = tuple(await in_flight(ask, list(ids.values()), at_once))
        say(f"Baseline: scoring its own answers at concurrency {at_once}")
        scored[at_once] = tuple([await asker.score(prompt, one.ids) for prompt, one in zip(ids.values(), answers[at_once], strict=True)])
    pairs = [([*one.top], [view.logprobs for view in views]) for at in answers for one, views in zip(answers[at], scored[at], strict=True)]
    first = plan.concurrency[0]
    for at_once in plan.concurrency[1:]:
        pairs += divergence.readings(answers[first], answers[at_once])
    regrets = [
        view.regret(token)
        for at in answers
        for one, views in zip(answers[at], scored[at], strict=True)
        for view, token in zip(views, one.ids, strict=True)
    ]
    try:
        noise = divergence.noise(pairs, regrets)
    except ValueError as error:
        raise LabError(
            "The baseline's own rounding cannot be measured with these answers.",
            why=f"At no position were its two best candidates within {divergence.CLOSE:g} nats of each other.",
            todo="Take more prompts, or longer answers.",
        ) from error
    return Baseline(ids, answers, scored, noise)


def _count(judged: Sequence[Judged]) -> dict[str, Any]:
    return {
        "identical": sum(one.verdict == "identical" for one in judged),
        "near_ties": sum(one.verdict == "near-tie" for one in judged),
        "real_differences": sum(one.verdict == "real difference" for one in judged),
        "tokens": sum(one.tokens for one in judged),
        "off_best": sum(one.off_best for one in judged),
        "worst_regret": max((one.worst for one in judged), default=0.0),
        "answers": [asdict(one) for one in judged],
    }


def itself(base: Baseline, plan: Plan) -> list[dict[str, Any]]:
    """The baseline at higher concurrency against itself at the first: what a server without any draft does."""
    first = plan.concurrency[0]
    found = []
    for at_once in plan.concurrency[1:]:
        rows = zip(base.ids, base.answers[first], base.scored[first], base.answers[at_once], base.scored[at_once], strict=True)
        judged = [divergence.judge(name, a.ids, x, b.ids, y, base.noise.threshold) for name, a, x, b, y in rows]
        found.append({"concurrency": at_once, **_count(judged)})
    return found


async def greedy(draft: Asker, baseline: Asker, base: Baseline, plan: Plan, say: Say) -> dict[str, Any]:
    """The draft's lane against the baseline at the same concurrency, every token judged by the baseline."""
    runs = []
    for at_once in plan.concurrency:
        say(f"Draft's lane: {len(base.ids)} answers at concurrency {at_once}")

        async def ask(prompt: tuple[int, ...]) -> Completion:
            return (await draft.complete(prompt, max_tokens=plan.max_tokens))[0]

        answers = await in_flight(ask, list(base.ids.values()), at_once)
        say(f"Target: judging every token of the answers at concurrency {at_once}")
        judged = []
        for (name, prompt), mine, theirs, seen in zip(base.ids.items(), answers, base.answers[at_once], base.scored[at_once], strict=True):
            views = seen if mine.ids == theirs.ids else await baseline.score(prompt, mine.ids)
            judged.append(divergence.judge(name, theirs.ids, seen, mine.ids, views, base.noise.threshold))
        runs.append({"concurrency": at_once, **_count(judged)})
    return {
        "prompts": len(base.ids),
        "max_tokens": plan.max_tokens,
        "threshold_nats": base.noise.threshold,
        "noise": asdict(base.noise),
        "baseline_itself": itself(base, plan),
        "runs": runs,
    }


async def check(lane: Lane, draft: Asker, baseline: Asker, base: Baseline, plan: Plan, say: Say) -> dict[str, Any]:
    """Everything about one draft's lane, as the certificate's body."""
    found = await greedy(draft, baseline, base, plan, say)
    some = dict(list(base.ids.items())[: plan.sample_prompts])
    sampling = []
    for temperature in plan.temperatures:
        ask, drawn = sampled.Ask(some, temperature, plan.samples, lane.k + 1), sampled.Drawn()
        await sampled.draw(draft, ask, drawn, say)
        sampling.append(
            sampled.summarise(await sampled.check(baseline, ask, drawn, say), ask, alpha=sampled.ALPHA / len(plan.temperatures))
        )
    drafting: dict[str, Any] = {
        "way": str(lane.recipe.speculative.get("draft_sample_method", "greedy")),
        "source": "vLLM's draft_sample_method",
    }
    if lane.traced and plan.temperatures:
        drafting["seen"] = await sampled.drafting(draft, next(iter(some.values())), max(plan.temperatures))
    verdict, reasons = decide(found, sampling)
    return {"verdict": verdict, "reasons": reasons, "greedy": found, "sampling": sampling, "drafting": drafting}


def decide(found: Mapping[str, Any], sampling: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The verdict, and every reason that speaks against `lossless`."""
    reasons = []
    for run in found["runs"]:
        if run["real_differences"]:
            reasons.append(
                f"{run['real_differences']} of {found['prompts']} greedy answers at concurrency {run['concurrency']} differ from the "
                f"target's by more than rounding: up to {nats(run['worst_regret'])} nats, and "
                f"{nats(found['threshold_nats'])} is the threshold."
            )
    for one in sampling:
        if one["verdict"] == "not the target's":
            reasons.append(
                f"At temperature {one['temperature']:g} the tokens do not follow the target's distribution "
                f"(adjusted p = {one['least_p_adjusted']:.2g})."
            )
    if found["noise"]["largest"] > divergence.MOST:
        return "undecided", [
            f"The baseline's own margins move by up to {found['noise']['largest']:.2f} nats between batch shapes: nothing can be told "
            "from real differences.",
            *reasons,
        ]
    return ("not lossless", reasons) if reasons else ("lossless", [])


def render(body: Mapping[str, Any], label: str) -> str:
    """The certificate as text for a terminal."""
    found = body["greedy"]
    rows = [
        ["baseline against itself", f"{run['concurrency']} / {found['runs'][0]['concurrency']}", *_cells(run)]
        for run in found["baseline_itself"]
    ]
    rows += [[label, str(run["concurrency"]), *_cells(run)] for run in found["runs"]]
    header = ["greedy", "concurrency", "identical", "near-ties", "real differences", "tokens judged", "largest regret, nats"]
    text = [
        f"{label}: {body['verdict'].upper()}",
        *(f"  {reason}" for reason in body["reasons"]),
        "",
        f"{found['prompts']} prompts, up to {found['max_tokens']} tokens. Threshold {nats(found['threshold_nats'])} nats: how far",
        f"the baseline's own margins move between batch shapes at the most, over {found['noise']['positions']} readings "
        f"(99% below {nats(found['noise']['p99'])}).",
        "",
        result.table(header, rows),
    ]
    for run in found["runs"]:
        for one in run["answers"]:
            if one["at"] is not None and one["ours"] is not None:
                theirs, ours = one["theirs"], one["ours"]
                text.append(
                    f"  {one['prompt']} at concurrency {run['concurrency']}: token {one['at'] + 1} is {ours[0]!r}, not {theirs[0]!r}; "
                    f"{one['margin']:.4f} nats below the target's best: {one['verdict']}"
                )
    for one in body["sampling"]:
        text += ["", *_distribution(one)]
    seen = body["drafting"].get("seen")
    text += ["", f"Draft tokens are {body['drafting']['way']}" + (_seen(seen) if seen else "") + "."]
    return "\n".join(text)


def _distribution(one: Mapping[str, Any]) -> list[str]:
    what = f"Temperature {one['temperature']:g}: {one['verdict']}. {one['tokens']} tokens behind the first, {len(one['prompts'])} prompts"
    if one["prompts"]:
        what += f", least adjusted p {one['least_p_adjusted']:.3g} (fails at {one['alpha']:g})"
    reach = one["detectable"]
    if not (reach["80%"] and reach["95%"]):
        return [f"{what}.", "The sample is too small to state what would have been found."]
    found = f"{reach['80%']:.3f} would have been found with 80%, of {reach['95%']:.3f} with 95%"
    return [f"{what}.", f"A total-variation distance from the target's distribution (rare tokens counted as one) of {found}."]


def _seen(seen: Mapping[str, Any]) -> str:
    return f" (seen: the same draft token in {seen['equal']} of {seen['compared']} answers with the same beginning)"


def _cells(run: Mapping[str, Any]) -> list[str]:
    counts = [str(run[key]) for key in ("identical", "near_ties", "real_differences", "tokens")]
    return [*counts, f"{run['worst_regret']:.4f}"]
