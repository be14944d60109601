"""Recipe to command line: what each lane gets, and that what people are shown is what runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex

import pytest

from lab import recipes
from lab.errors import LabError
from lab.serving.command import MIDDLEWARE, MODULE, SCHEDULER, Lane, command

RECIPE = recipes.get("smollm2")


def value(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize("k", [0, -1, 9, 99])
def test_k_out_of_range_is_said(k: int) -> None:
    with pytest.raises(LabError, match=f"K = {k} "):
        Lane(RECIPE, "bf16", k)


def test_the_baseline_has_no_k() -> None:
    assert Lane(RECIPE, "none", 3).k == 0


def test_a_draft_that_the_recipe_lacks() -> None:
    with pytest.raises(LabError, match="none, bf16"):
        Lane(dataclasses.replace(RECIPE, drafts={"bf16": RECIPE.drafts["bf16"]}), "fp8", 3)


def test_keys_differ_between_configurations() -> None:
    lanes = [
        Lane(RECIPE, draft, k, compiled, traced)
        for draft, k, compiled, traced in itertools.product(("none", "bf16", "fp8"), (1, 3), (True, False), (True, False))
    ]
    assert len({lane.key for lane in lanes}) == len({(lane.draft, lane.k, lane.compiled, lane.traced) for lane in lanes}) == 20
    assert Lane(RECIPE, "bf16", 3).key == "smollm2/bf16/k3/eager/traced"
    assert Lane(RECIPE, "bf16", 3).label == "Eagle3 BF16, K=3, eager"


def test_the_measured_baseline_is_vllm_alone() -> None:
    made = command(Lane(RECIPE, traced=False), target="t", draft=None, port=1, trace_socket="ipc:///x")
    assert made.environment["VLLM_PLUGINS"] == ""
    assert "EAGLE3_LAB_TRACE_SOCKET" not in made.environment
    assert not {"--scheduler-cls", "--middleware", "--speculative-config", "--no-async-scheduling"} & {*made.argv}


def test_a_traced_draft_lane() -> None:
    made = command(Lane(RECIPE, "bf16", 4), target="t", draft="d", port=1, trace_socket="ipc:///x")
    assert json.loads(value(made.argv, "--speculative-config")) == {"method": "eagle3", "model": "d", "num_speculative_tokens": 4}
    assert (value(made.argv, "--scheduler-cls"), value(made.argv, "--middleware")) == (SCHEDULER, MIDDLEWARE)
    assert "--no-async-scheduling" in made.argv
    assert made.environment["EAGLE3_LAB_TRACE_SOCKET"] == "ipc:///x"
    assert "VLLM_PLUGINS" not in made.environment


def test_eager_and_compiled_flags() -> None:
    eager, compiled = (command(Lane(RECIPE, compiled=choice), target="t", draft=None, port=1).argv for choice in (False, True))
    assert "--enforce-eager" in eager
    assert "--enforce-eager" not in compiled


def test_both_launchers_run_the_same_flags_and_people_see_vllm_serve() -> None:
    lane, arguments = Lane(RECIPE, "bf16", 3), {"target": "/a b/it's", "draft": "d", "port": 8000}
    serve = command(lane, **arguments)
    module = command(lane, **arguments, launcher=("python", *MODULE))
    assert serve.argv[:3] == ("vllm", "serve", "/a b/it's")
    assert module.argv[:5] == ("python", *MODULE, "--model", "/a b/it's")
    assert serve.argv[3:] == module.argv[5:]
    assert serve.shell() == module.shell()


def test_the_shown_line_is_the_command_quoted() -> None:
    recipe = dataclasses.replace(RECIPE, environment={"A": "x y", "B": "$HOME"})
    made = command(Lane(recipe, "bf16", 3), target="/a b/it's $x", draft="d", port=8000)
    words = shlex.split(made.shell())
    settings = dict(word.split("=", 1) for word in words[: len(made.environment)])
    assert settings == made.environment
    assert tuple(words[len(made.environment) :]) == made.argv


def test_draft_and_checkpoint_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        command(Lane(RECIPE, "bf16", 3), target="t", draft=None, port=1)
