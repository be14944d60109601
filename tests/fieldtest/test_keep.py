"""What a test keeps under its names, and the order in which lanes that share a GPU are examined."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lab.bench import agg, overlay
from lab.fieldtest import keep, plan, run
from lab.fieldtest.scrub import Scrubber
from tests.fieldtest.made import small


def test_names_say_the_machine_and_the_recipe() -> None:
    assert keep.slug("1 x NVIDIA H200", "smollm2-gpu") == "nvidia-h200-smollm2-gpu"
    assert keep.slug("4 x AMD Instinct MI355X", "kimi-k2.5") == "4-x-amd-instinct-mi355x-kimi-k2.5"


def test_rows_certificates_and_recordings_are_kept_and_scrubbed(make: Callable[..., run.Test]) -> None:
    test = make(small(hw="1 x NVIDIA H200"))
    row: dict[str, Any] = {
        "conc": 4, "output_tput_per_gpu": 100.0, "hw": "secret-host", "eagle3_lab_provenance": {"made": "now"},
        "eagle3_lab_client_argv": ["a"],
    }  # fmt: skip
    (test.folder / "lossless-bf16.json").write_text('{"verdict": "lossless"}')
    (test.folder / "recordings").mkdir()
    (test.folder / "recordings" / "eagle3-bf16-good-prompt.jsonl").write_text("{}\n")
    made = keep.keep(test, [row, {**row, "conc": 8}], Scrubber({"secret-host": "HOST"}, {}))
    assert [path.name for path in made] == [
        "nvidia-h200-smollm2-sweep.json",
        "nvidia-h200-smollm2-lossless-bf16.json",
        "eagle3-bf16-good-prompt-nvidia-h200-smollm2.jsonl",
    ]
    first, second = json.loads(made[0].read_text())
    assert first["eagle3_lab_provenance"] == {"made": "now"}
    assert "eagle3_lab_provenance" not in second
    assert "eagle3_lab_client_argv" not in first
    assert first["hw"] == "HOST"
    rows, errors = agg.load([made[0]])
    assert ([one["conc"] for one in rows], errors) == ([4, 8], [])


def test_lanes_that_share_a_gpu_are_traced_and_judged_before_the_sweep() -> None:
    settings = small("smollm2-gpu", together=True)
    names = [stage.name for stage in plan.stages(settings)]
    assert names == [
        "doctor", "start-none-traced", "traces-none", "start-bf16-traced", "traces-bf16", "start-fp8-traced", "traces-fp8",
        "start-none", "start-bf16", "start-fp8", "answers-bf16", "answers-fp8", "lossless-bf16", "lossless-fp8",
        "sweep-all-conc1", "sweep-all-conc2",
    ]  # fmt: skip
    assert settings.room
    assert not plan.replace(settings, together=False).room
    assert not small(together=True).room, "on a CPU the reference has no place beside the lanes"


def test_prompts_from_files_are_swept_on_the_same_servers() -> None:
    from lab.fieldtest.cli import _texts

    settings = small("smollm2-gpu", together=True, texts=_texts(64))
    sweeps = [stage for stage in plan.stages(settings) if stage.kind == "sweep"]
    assert [stage.name for stage in sweeps] == ["sweep-all-conc1", "sweep-all-chat-conc1", "sweep-all-conc2", "sweep-all-chat-conc2"]
    assert sweeps[0].lanes == sweeps[-1].lanes
    assert [stage.workload.name for stage in sweeps if stage.workload] == ["64/32", "chat", "64/32", "chat"]
    assert settings.definition() != plan.replace(settings, texts=()).definition()


def test_what_is_kept_differs_in_nothing_when_it_is_opened_again(make: Callable[..., run.Test]) -> None:
    """Provenance stands in the first row only, and is every row's."""
    origin = {"versions": {"vllm": "0.26.0"}, "hardware": {"cores": 32}, "recipe": {"flags": []}, "revision": "abc"}
    row: dict[str, Any] = {
        "conc": 4, "output_tput_per_gpu": 100.0, "hw": "h", "image": "vllm 0.26.0", "eagle3_lab_key": "a", "eagle3_lab_provenance": origin,
    }  # fmt: skip
    made = keep.keep(make(), [row, {**row, "conc": 8}], Scrubber({}, {}))
    rows, _ = agg.load([made[0]])
    assert overlay.differences(rows) == []


def test_a_row_of_another_origin_keeps_it(make: Callable[..., run.Test]) -> None:
    origin = {"made": "now", "argv": ["a"], "revision": "abc", "prompts": {}}
    row: dict[str, Any] = {"conc": 4, "output_tput_per_gpu": 100.0, "eagle3_lab_key": "a"}
    found = [origin, origin | {"made": "later", "argv": ["b"]}, origin | {"revision": "def"}, origin | {"revision": "def"}]
    made = keep.keep(make(), [row | {"eagle3_lab_provenance": one} for one in found], Scrubber({}, {}))
    assert ["eagle3_lab_provenance" in one for one in json.loads(made[0].read_text())] == [True, False, True, False]
    rows, _ = agg.load([made[0]])
    assert [one["eagle3_lab_provenance"]["revision"] for one in rows] == ["abc", "abc", "def", "def"]
