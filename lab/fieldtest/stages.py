"""What each stage does: it calls the parts that the other commands are made of, and leaves their own files in the test's folder.

One server a turn where the machine holds one: the lane that a stage needs is started, and the one before is stopped first. For that, the
losslessness check is split where `lab.bench.lossless` asks two servers in turns: a draft's lane writes its answers to a file, and later the
reference judges the file (`Replayed`), with the same judging. Sampled distributions need both servers at once and are not part of it:
`eagle3-lab verify` checks them where two servers fit.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from lab import checkpoints, provenance
from lab.bench import certificate, client, grid, lossless, origin, record, result, sweep, sweep_run
from lab.bench.scoring import Asker, Completion, in_flight
from lab.doctor import gather, report
from lab.doctor.server import ask
from lab.doctor.subject import Subject
from lab.errors import LabError
from lab.fieldtest.plan import Settings, Stage
from lab.serving.client import DEPTH_ARGUMENT
from lab.serving.command import Lane, command
from lab.serving.endpoint import Endpoint, Progress
from lab.serving.lanes import Lanes
from lab.serving.metrics import Snapshot, cache_tokens, read, scrape
from lab.trace import io, stats
from lab.trace.model import Request, Trace

#: Counters are told after the answer: so often they are looked at again, and seconds between.
LOOKS, LAG = 20, 0.1


class Replayed:
    """Answers from a file in place of a server: for each prompt the next one, in the order in which concurrencies were asked."""

    def __init__(self, saved: dict[str, Any], order: Sequence[int]) -> None:
        self._left: dict[tuple[int, ...], deque[Completion]] = {}
        for at_once in order:
            for prompt, answer in zip(saved["prompts"], saved["answers"][str(at_once)], strict=True):
                self._left.setdefault(tuple(prompt), deque()).append(Completion(tuple(answer)))

    async def complete(self, ids: Sequence[int], *, max_tokens: int) -> list[Completion]:  # noqa: ARG002 - as `Asker` has it
        """The next saved answer to the prompt `ids`."""
        if not self._left.get(tuple(ids)):
            raise LabError("An answer is not in the file.", why="The reference reads a prompt as other tokens than the draft's lane did.")
        return [self._left[tuple(ids)].popleft()]


class Stages:
    """The work of a test: call it with a stage. Keeps nothing but the servers and the reference's own answers."""

    def __init__(self, settings: Settings, folder: Path, lanes: Lanes, say: Callable[[str], None]) -> None:
        self.settings, self.folder, self.lanes, self.say = settings, folder, lanes, say
        self._base: lossless.Baseline | None = None
        self._last: dict[str, str] = {}
        self._client = client.Worker()

    async def __call__(self, stage: Stage) -> str:
        """Do the stage; a sentence on what came of it. Raises `LabError`."""
        does = {
            "doctor": self._doctor, "start": self._start, "answers": self._answers, "sweep": self._sweep, "judge": self._judge,
            "traces": self._traces,
        }  # fmt: skip
        return await does[stage.kind](stage)

    async def close(self) -> None:
        """End the benchmark's client; the servers are the caller's."""
        await self._client.close()

    def warm(self) -> list[str]:
        """Keys of the lanes that run now."""
        return [one.lane.key for one in self.lanes.status() if one.state == "ready"]

    def keep_logs(self) -> None:
        """Copy the servers' logs into the folder: the cache keeps only the last ones."""
        for one in self.lanes.status():
            if one.log and Path(one.log).is_file():
                target = self.folder / "logs" / Path(one.log).name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(one.log, target)

    def _write(self, name: str, content: Any) -> Path:
        path = self.folder / name
        provenance.write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return path

    def _progress(self, lane: Lane) -> Callable[[Progress], None]:
        def tell(news: Progress) -> None:
            if self._last.get(lane.key) != news.detail:
                self._last[lane.key] = news.detail
                self.say(f"    {lane.label}: {news.stage}, {news.elapsed:.0f} s: {news.detail[:120]}")

        return tell

    @asynccontextmanager
    async def _server(self, lane: Lane) -> AsyncIterator[Endpoint]:
        await self._room(lane)
        async with self.lanes.use(lane, on_progress=self._progress(lane)) as endpoint:
            yield endpoint

    async def _room(self, lane: Lane) -> None:
        """Stop the others, but for measured lanes beside a measured one where all fit together; and forget a server that died: it gets
        another start."""
        measured = {self.settings.lane(draft).key for draft in self.settings.drafts} if self.settings.together else set()
        measured |= {self.settings.reference.key} if self.settings.room else set()
        for one in self.lanes.status():
            other = one.lane.key != lane.key
            if one.state in ("starting", "ready") and other and not {one.lane.key, lane.key} <= measured:
                await self.lanes.stop(one.lane)
            elif one.state == "dead" and not other:
                await self.lanes.restart(lane, on_progress=self._progress(lane))

    async def _doctor(self, _stage: Stage) -> str:
        found = await asyncio.to_thread(self._examine)
        self._write("doctor.json", {"reports": [report.as_json(one) for one in found]})
        provenance.write_text(self.folder / "doctor.txt", "\n\n".join(report.text(one, verbose=True) for one in found) + "\n")
        return f"{sum(one.count('error') for one in found)} errors and {sum(one.count('warning') for one in found)} warnings."

    def _examine(self) -> list[report.Report]:
        one, machine = self.settings, gather.machine_of(self.settings.recipe)
        made = [gather.from_recipe(one.recipe, draft, traced=False, tp=one.tp, machine=machine) for draft in one.drafts]
        return [report.report(subject) for subject in made]

    async def _start(self, stage: Stage) -> str:
        (lane,) = stage.lanes
        began = asyncio.get_running_loop().time()
        async with self._server(lane) as endpoint:
            took = asyncio.get_running_loop().time() - began
            kv = cache_tokens(await read(endpoint, timeout=30.0))
        weights = None if lane.draft == "none" else lane.recipe.drafts[lane.draft]
        made = command(
            lane,
            target=checkpoints.location(lane.recipe.target),
            draft=None if weights is None else checkpoints.location(weights),
            port=8000,
        )
        facts = {
            "lane": lane.key, "label": lane.label, "draft": lane.draft, "k": lane.k, "traced": lane.traced, "rescheduled": lane.rescheduled,
            "mode": "compiled" if lane.compiled else "eager", "tp": lane.tp, "max_model_len": lane.max_model_len, "seconds": took,
            "kv_cache_tokens": kv, "command": made.script(), "provenance": provenance.collect(),
        }  # fmt: skip
        self._write(f"lanes/{stage.name.removeprefix('start-')}.json", facts)
        return f"Ready after {took:.0f} s{f'; its KV cache holds {kv} tokens' if kv else ''}."

    async def _answers(self, stage: Stage) -> str:
        (lane,) = stage.lanes
        one = self.settings
        async with self._server(lane) as endpoint, Asker(endpoint) as asker:
            prompts = [await asker.tokens(prompt.text) for prompt in one.prompts]

            async def answer(ids: tuple[int, ...]) -> list[int]:
                return list((await asker.complete(ids, max_tokens=one.max_tokens))[0].ids)

            answers = {str(at_once): await in_flight(answer, prompts, at_once) for at_once in one.verify_at}
            running = await ask(endpoint.url)
        examined = report.report(Subject(gather.machine_of(one.recipe), server=running, source=f"the running lane {lane.label}"))
        self._write(f"doctor-running-{lane.draft}.json", report.as_json(examined))
        content = {"lane": lane.key, "ids": [prompt.id for prompt in one.prompts], "prompts": prompts, "answers": answers}
        result.save(self.folder / f"answers-{lane.draft}.json", "answers", provenance.collect(), content, indent=None)
        found = ", ".join(finding.title for finding in examined.findings if finding.level != "note")
        return f"{len(prompts) * len(answers)} answers.{f' The doctor on the running server: {found}.' if found else ''}"

    async def _sweep(self, stage: Stage) -> str:
        one = self.settings
        plan = sweep.Plan(
            stage.lanes, (stage.workload or one.workload,), (stage.concurrency,), one.seeds, one.prompts_per, one.warm_ups_per, loops=False,
            least=one.least,
        )  # fmt: skip
        if not one.together:
            await self._room(stage.lanes[0])
        made = await asyncio.to_thread(
            sweep_run.prepare, plan, self.folder / "sweep", results=self.folder, together=one.together, hw=one.hw
        )
        await sweep_run.run(made, self.lanes, worker=self._client)
        refused = {row.reason for row in made if row.state == "refused"}
        if failed := [row for row in made if row.state == "failed"]:
            raise LabError(f"{len(failed)} of {len(made.rows)} cells failed.", why=failed[0].reason)
        if len(refused) and not any(row.result for row in made):
            raise LabError("Nothing could be measured at this concurrency.", why=" ".join(sorted(refused)))
        speeds = [f"{row.cell.lane.label} {row.result['output_tput_per_gpu']:.1f}" for row in made if row.result is not None]
        said = f"Output tok/s for each {'GPU' if one.recipe.hardware else 'machine'}: {'; '.join(speeds)}." if speeds else ""
        return " ".join(part for part in (said, f"Refused: {'; '.join(sorted(refused))}" if refused else "") if part)

    def _saved(self, draft: str) -> dict[str, Any]:
        path = self.folder / f"answers-{draft}.json"
        try:
            return cast("dict[str, Any]", msgspec.json.decode(path.read_bytes()))
        except (OSError, msgspec.MsgspecError) as error:
            raise LabError(
                f"{path.name} cannot be read.", why=f"{type(error).__name__}.", todo="Remove it and run the test again."
            ) from error

    async def _judge(self, stage: Stage) -> str:
        (reference,) = stage.lanes
        draft = cast(Any, stage.name.removeprefix("lossless-"))
        one, lane = self.settings, self.settings.lane(draft)
        plan = lossless.Plan(one.prompts, one.verify_at, one.max_tokens, temperatures=(), samples=0)
        saved = self._saved(draft)
        async with self._server(reference) as endpoint, Asker(endpoint) as baseline:
            if self._base is None:
                self._base = await lossless.ask_baseline(baseline, plan, lambda text: self.say(f"    {text}"))
            replayed = cast(Asker, Replayed(saved, one.verify_at))
            found = await lossless.greedy(replayed, baseline, self._base, plan, lambda text: self.say(f"    {text}"))
        verdict, reasons = lossless.decide(found, [])
        drafting = {"way": str(lane.recipe.speculative.get("draft_sample_method", "greedy")), "source": "vLLM's draft_sample_method"}
        body = {"verdict": verdict, "reasons": reasons, "greedy": found, "sampling": [], "drafting": drafting}
        identity = await asyncio.to_thread(certificate.identity, lane)
        assert identity is not None
        described = await asyncio.to_thread(origin.describe, [lane, reference], [])
        certificate.save(lane, identity, described, body, self.folder / f"lossless-{draft}.json")
        provenance.write_text(self.folder / f"lossless-{draft}.txt", lossless.render(body, lane.label) + "\n")
        return f"{verdict[0].upper()}{verdict[1:]} (greedy, {len(one.prompts)} prompts).{' ' if reasons else ''}{' '.join(reasons)}"

    async def _against_counters(self, endpoint: Endpoint, before: Snapshot, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Drafts, draft tokens and accepted tokens of `requests` by their traces, and by the server since `before`, which may lag."""
        drafts = [step for request in requests for step in request.steps if step.draft]
        traced = [len(drafts), sum(len(step.draft) for step in drafts), sum(step.accepted for step in drafts)]
        for _ in range(LOOKS):
            now = await scrape(endpoint, timeout=30.0)
            counters = [
                now.drafts - before.drafts, now.draft_tokens - before.draft_tokens, now.accepted_tokens - before.accepted_tokens,
            ]  # fmt: skip
            if counters == traced:
                break
            await asyncio.sleep(LAG)
        return {"traced": traced, "counters": counters}

    async def _traces(self, stage: Stage) -> str:
        (lane,) = stage.lanes
        one, common = self.settings, self.settings.common_k
        passes: list[tuple[str, int, dict[str, int]]] = [(lane.draft, lane.k, {})]
        if common is not None and lane.k > common:
            passes.append((f"{lane.draft}-k{common}", common, {DEPTH_ARGUMENT: common}))
        said = []
        async with self._server(lane) as endpoint:
            for name, k, asked in passes:
                before = await scrape(endpoint, timeout=30.0)
                requests = await grid.ask_all(endpoint, one.prompts, 1, one.max_tokens, asked)
                counted = await self._against_counters(endpoint, before, requests)
                source = provenance.collect(
                    recipe=lane.recipe.name, lane=lane.key, draft=lane.draft, k=k, traced=True, rescheduled=lane.rescheduled,
                    mode="compiled" if lane.compiled else "eager", target=lane.recipe.target.name,
                    flags=[" ".join(part for part in flag if part) for flag in lane.recipe.flags],
                )  # fmt: skip
                io.save(Trace(provenance=source, requests=requests), self.folder / "traces" / f"{name}{io.SUFFIX}")
                self._write(f"traces/{name}-counters.json", counted)
                if counted["traced"] != counted["counters"]:
                    raise LabError(
                        "The traces and the server's own counters differ.",
                        why=f"Drafts, draft tokens, accepted: traced {counted['traced']}, counted {counted['counters']}.",
                        todo=f"Look at traces/{name}{io.SUFFIX}, and whether somebody else used this server.",
                    )
                length = stats.count(step for request in requests for step in request.steps).mean_acceptance_length
                said.append(
                    f"{len(requests)} answers, equal to the server's counters"
                    + (f", K={k}: mean acceptance length {length:.2f}, bonus included" if length else "")
                )
            for name in record.of(lane):
                await record.on(endpoint, lane, name, self.folder / "recordings")
        return "; ".join(said) + "."
