"""The shipped prompts are what their README says, and other files of prompts are read or refused with a sentence."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from lab import env
from lab.bench import prompts
from lab.errors import LabError

FOLDER = env.assets() / "prompts"


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def alike(one: str, other: str) -> float:
    """Jaccard similarity of the sets of words."""
    a, b = {*words(one)}, {*words(other)}
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("kind", prompts.KINDS)
def test_counts_lengths_and_kinds(kind: str) -> None:
    found = prompts.shipped(kind).prompts
    assert len(found) >= 88
    assert {prompt.kind for prompt in found} == {kind}
    assert all(prompt.context is None for prompt in found)
    lengths = [len(prompt.text) for prompt in found]
    assert min(lengths) >= 15
    assert max(lengths) <= 800
    assert sum(length > 150 for length in lengths) >= 3, "some prompts should bring material of their own"


def test_no_prompt_twice_or_nearly() -> None:
    every = [prompt for kind in prompts.KINDS for prompt in prompts.shipped(kind).prompts]
    assert len({prompt.id for prompt in every}) == len(every)
    assert len({prompt.text.casefold() for prompt in every}) == len(every)
    near = [(a.id, b.id, round(alike(a.text, b.text), 2)) for a, b in itertools.combinations(every, 2) if alike(a.text, b.text) > 0.6]
    assert not near
    shapes = Counter(tuple(words(prompt.text)[:6]) for prompt in every)
    assert max(shapes.values()) <= 3, "prompts made from one template"


def test_a_swapped_noun_counts_as_nearly_the_same() -> None:
    one = "Write a Python function that returns the second largest number in a list."
    assert alike(one, one.replace("largest", "smallest")) > 0.6


def test_long_prompts_have_their_lengths() -> None:
    rows = [json.loads(line) for line in (FOLDER / "long.jsonl").read_text(encoding="utf-8").splitlines()]
    assert Counter(row["context"] for row in rows) == {1024: 8, 2048: 8, 4096: 8}
    for row in rows:
        assert 0.9 * (row["context"] - 128) <= row["tokens"] <= row["context"] - 128
        assert 3 < len(row["prompt"]) / row["tokens"] < 5
    questions = [row["prompt"].rsplit("\n\n", 1)[1] for row in rows]
    assert len({*questions}) == len(rows)


def test_the_lengths_are_right_in_the_tokens_of_the_target() -> None:
    tokenizer = env.cache_dir() / "checkpoints" / "smollm2-135m-instruct" / "tokenizer.json"
    tokenizers = pytest.importorskip("tokenizers", reason="the engine's packages are not installed")
    if not tokenizer.exists():
        pytest.skip("the target has not been prepared in the cache yet")
    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    for line in (FOLDER / "long.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = f"{system}<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        assert len(encode(text).ids) == row["tokens"], row["id"]


def test_the_readme_names_the_files_as_they_are() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for kind in (*prompts.KINDS, prompts.LONG):
        name = f"{kind}.jsonl"
        sha = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
        assert re.search(rf"`{name}` .* `{sha}`", readme), f"{name} was changed: it is meant to stay as it is"
        assert prompts.shipped(kind).sha256 == sha


def test_spec_bench_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "others.jsonl"
    path.write_text('{"question_id": 7, "category": "math", "turns": ["How much?", "And now?"], "reference": ["3"]}\n\n')
    (found,) = prompts.load(path).prompts
    assert found == prompts.Prompt("7", "math", "How much?")


def test_several_files_keep_their_ids_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "other/a.jsonl")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"question_id": 0, "turns": ["Hello"]}\n')
    assert [prompt.id for one in prompts.gather((), paths[:2]) for prompt in one.prompts] == ["a/0", "b/0"]
    assert [prompt.id for one in prompts.gather((), paths) for prompt in one.prompts] == ["a (1)/0", "b/0", "a (2)/0"]
    paths[1] = paths[1].rename(tmp_path / "a (1).jsonl")
    assert [prompt.id for one in prompts.gather((), paths) for prompt in one.prompts] == ["a (2)/0", "a (1)/0", "a (3)/0"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompts"),
        ("hello\n", "Line 1:"),
        ('{"id": "a", "prompt": "x"}\n[1]\n', "Line 2 is not a JSON object"),
        ('{"turns": []}\n', 'no text in "turns"'),
        ('{"text": "x"}\n', 'neither "prompt" nor "turns"'),
        ('{"prompt": "  "}\n', "empty prompt"),
        ('{"prompt": "x", "context": "long"}\n', "not a number of tokens"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "id 'a' twice"),
    ],
)
def test_other_files_are_refused_with_a_reason(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(LabError, match=re.escape(said)):
        prompts.load(path)


def test_a_missing_file_and_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="No such file"):
        prompts.load(tmp_path / "none.jsonl")
    with pytest.raises(LabError, match="kind 'poetry'"):
        prompts.shipped("poetry")
