"""A draft's working folder: of one target, whole files only, and one sentence for what is damaged or does not fit on the disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.errors import LabError
from lab.train import card, cli, state
from lab.train.loop import Trainer
from lab.train.target import Target

RUN = "run"


def quiet(_line: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def other_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape and with the same tokenizer."""
    folder = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(tiny_target, folder)
    weights = {name: tensor * 1.5 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def trained(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished draft and its `work`."""
    folder = tmp_path_factory.mktemp("trained")
    cli.everything(folder / "draft", tiny_target, folder / "work", "cpu", tiny=True)
    return folder


@pytest.fixture
def work(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run's working folder."""
    shutil.copytree(trained / "work", tmp_path / "work")
    return tmp_path / "work"


def same_draft(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor)


def test_another_target_needs_another_folder(other_target: Path, work: Path, tmp_path: Path) -> None:
    """The corpora are what one target wrote, and the run learnt from it: another of the same shape must not get them."""
    kept = (work / "corpus" / "chat-000.npz").read_bytes()
    calls: list[Callable[[], None]] = [
        lambda: cli.corpus(other_target, work, "cpu", tiny=True),
        lambda: cli.draft(tmp_path / "draft", other_target, work, "cpu", tiny=True),
        lambda: cli.draft(tmp_path / "draft", other_target, work, "cpu", tiny=True, steps=4),  # a run that is not there yet
    ]
    for call in calls:
        with pytest.raises(LabError, match=r"corpora and the runs of another target.*--work"):
            call()
    assert not (tmp_path / "draft").exists()
    assert (work / "corpus" / "chat-000.npz").read_bytes() == kept


def test_a_recipe_that_two_targets_share_needs_two_folders(tiny_target: Path, other_target: Path, tmp_path: Path) -> None:
    """The folder that `--mla` makes has the recipe's name: it fits every target of its sizes."""
    recipe, work = tmp_path / "r.safetensors", tmp_path / "work"
    cli.mla(recipe, tiny_target, tmp_path / "mla", "cpu", tiny=True, heal=False)
    cli.corpus(tiny_target, work, "cpu", tiny=True, only=["chat"], mla=recipe)
    cli.corpus(other_target, work, "cpu", tiny=True, only=["chat"])  # without it, the folder itself is still free
    with pytest.raises(LabError, match="another target"):
        cli.corpus(other_target, work, "cpu", tiny=True, only=["chat"], mla=recipe)


def test_an_older_folder_goes_on(tiny_target: Path, trained: Path, work: Path, tmp_path: Path) -> None:
    """One that does not say whose it is, and a state that does not say where it started."""
    (work / state.DRAFT_TARGET).unlink()
    saved = torch.load(work / RUN / "state.pt", weights_only=True)
    assert saved.keys() == {"plan", "start", "draft", "optimisers", "step", "seconds"}
    del saved["start"]
    torch.save(saved, work / RUN / "state.pt")
    cli.everything(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    same_draft(trained / "draft", tmp_path / "draft")
    assert (work / state.DRAFT_TARGET).exists()


def test_a_folder_without_corpora_stays_free(tiny_target: Path, other_target: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no corpus 'chat'"):
        cli.draft(tmp_path / "draft", tiny_target, tmp_path / "work", "cpu", tiny=True)
    assert not (tmp_path / "work").exists()
    cli.corpus(other_target, tmp_path / "work", "cpu", tiny=True, only=["chat"])


@pytest.mark.parametrize("name", ["draft-target.json", "corpus/chat.json", "corpus/work-000.npz", f"{RUN}/state.pt"])
@pytest.mark.parametrize("length", [0, 60])
def test_a_damaged_file_is_a_sentence(tiny_target: Path, trained: Path, work: Path, tmp_path: Path, name: str, length: int) -> None:
    """Named, so that it can be deleted; then the run goes on, and ends where it did."""
    (work / name).write_bytes((work / name).read_bytes()[:length])
    with pytest.raises(LabError, match=r"is damaged\. .*Delete it") as failed:
        cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    assert str(work / name) in str(failed.value)
    assert "weights_only" not in str(failed.value)
    assert not list(tmp_path.glob("draft*"))
    (work / name).unlink()
    cli.everything(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    same_draft(trained / "draft", tmp_path / "draft")


def test_half_a_line_of_the_log_is_a_sentence(tiny_target: Path, trained: Path, work: Path, tmp_path: Path) -> None:
    """Before the run goes on; without the log the run still ends with what it achieved."""
    log = work / RUN / "log.jsonl"
    last = card.read_log(log)[-1]
    log.write_text(log.read_text()[:-20])
    with pytest.raises(LabError, match=r"log\.jsonl is damaged\. .*Delete it"):
        cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    log.unlink()
    cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    same_draft(trained / "draft", tmp_path / "draft")
    (record,) = card.read_log(tmp_path / "draft" / "log.jsonl")
    assert record == {**{name: value for name, value in last.items() if name != "loss"}, "seconds": record["seconds"]}


def test_a_state_that_lacks_something_is_damaged(tiny_target: Path, work: Path, tmp_path: Path) -> None:
    path = work / RUN / "state.pt"
    saved = torch.load(path, weights_only=True)
    for key in ("draft", "optimisers", "step"):
        torch.save({name: value for name, value in saved.items() if name != key}, path)
        with pytest.raises(LabError, match=r"state\.pt is damaged"):
            cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    torch.save({**saved, "draft": {}}, path)
    with pytest.raises(LabError, match=r"state\.pt is damaged"):
        cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)


def test_a_description_that_is_gone_is_a_sentence_before_the_training(tiny_target: Path, work: Path, tmp_path: Path) -> None:
    (work / "corpus" / "long.json").unlink()
    shutil.rmtree(work / RUN)
    with pytest.raises(LabError, match=r"no corpus 'long'.*eagle3-lab train corpus"):
        cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    assert not (work / RUN).exists()


def test_too_little_memory_is_no_damage(tmp_path: Path) -> None:
    """Whose advice is to delete the file."""
    with pytest.raises(torch.OutOfMemoryError), state.reading(tmp_path / "state.pt"):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@contextmanager
def no_space_after(limit: int) -> Iterator[None]:
    """Files of this process end at `limit` bytes, for C and Rust code, too: a disk that is full, as far as a process can make one."""
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_the_disk_does_not_take_is_a_sentence(
    tiny_target: Path, trained: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a run keeps: a shard, its description, the state, the log, the draft itself. Nothing half-written stays."""
    monkeypatch.setattr(cli, "_say", quiet)  # pytest keeps what is printed in a file, too
    fresh, output = tmp_path / "fresh", tmp_path / "draft"
    model = Target.load(tiny_target)
    shard = (work / "corpus" / "chat-000.npz").stat().st_size
    assert (work / "corpus" / "chat.json").stat().st_size < shard - 1
    for limit in (0, 200, shard - 1):  # nothing; the target's sum; its description, too, but no shard
        with no_space_after(limit), pytest.raises(LabError, match="cannot be written"):
            cli.corpus(tiny_target, fresh, "cpu", tiny=True)
        assert not list(fresh.rglob("*.npz*"))
        assert not list(fresh.rglob("*.tmp-*"))
    before = files(work)
    trainer = Trainer(cli.train_plan(tiny=True), model, work / "corpus", work / RUN, quiet)
    for write in (trainer.save, lambda: trainer.record(None, evaluate=False)):
        with no_space_after(100), pytest.raises(LabError, match=r"cannot be written.*--work"):
            write()
    trainer = Trainer(cli.train_plan(tiny=True), model, work / "corpus", work / "another", quiet)
    with no_space_after(20_000), pytest.raises(LabError, match=r"cannot be written.*--work"):
        trainer.run()
    shutil.rmtree(work / "another")
    assert files(work) == before
    for limit in (500, 20_000, (trained / "draft" / "model.safetensors").stat().st_size - 1):
        with no_space_after(limit), pytest.raises(LabError, match=r"cannot be written.*--output"):
            cli._finish(trainer, work / RUN, output, {"target": "t"})
        assert not list(tmp_path.glob("draft*"))


def test_a_full_disk_says_so(tiny_target: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: object) -> int:  # noqa: ARG001
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (work / "corpus" / "chat-000.npz").unlink()
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(LabError, match=r"no space left on the disk for .*chat.*--work"):
        cli.corpus(tiny_target, work, "cpu", tiny=True)


def test_stopped_in_the_last_evaluation_the_log_still_ends_there(
    tiny_target: Path, trained: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card takes what the run achieved from the log's end."""
    shutil.rmtree(work / RUN)
    evaluate = Trainer.held_out

    def interrupted(self: Trainer) -> Iterator[tuple[str, dict[str, float]]]:
        if self.step == self.plan.steps:
            raise KeyboardInterrupt
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "held_out", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    assert card.read_log(work / RUN / "log.jsonl")[-1]["step"] == 5
    cli.draft(tmp_path / "draft", tiny_target, work, "cpu", tiny=True)
    found, straight = (card.read_log(folder / "draft" / "log.jsonl")[-1] for folder in (tmp_path, trained))
    assert found["step"] == 6
    assert {name: value for name, value in found.items() if isinstance(value, dict)} == {
        name: value for name, value in straight.items() if isinstance(value, dict)
    }
    # Once more, from the finished run: nothing is added.
    lines = (work / RUN / "log.jsonl").read_text()
    cli.draft(tmp_path / "again", tiny_target, work, "cpu", tiny=True)
    assert (work / RUN / "log.jsonl").read_text() == lines
