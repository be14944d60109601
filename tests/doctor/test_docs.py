"""docs/doctor.md is true: its commands run, its example is a real rule, and its exit codes are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.doctor.cli import app
from lab.doctor.rule import all_rules

DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "doctor.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split(" #")[0].strip()
    for block in re.findall(r"^```bash\n(.*?)^```", DOCUMENT, flags=re.M | re.S)
    for line in block.splitlines()
    if line.startswith("eagle3-lab doctor")
]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", [one for one in COMMANDS if "http" not in one])
def test_a_command_runs(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[2:])
    assert result.exit_code in (0, 3), result.output
    assert isinstance(result.exception, SystemExit | type(None))


def test_the_server_command_has_real_options() -> None:
    (command,) = [one for one in COMMANDS if "http" in one]
    result = CliRunner().invoke(app, ["--help"])
    for option in re.findall(r"--[a-z]+", command):
        assert option in result.output


def test_the_example_is_a_real_rule() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, flags=re.M | re.S)
    name, level = re.findall(r'^    "([^"]+)",', example, flags=re.M)[:2]
    real = all_rules()[name]
    assert real.level == level
    assert f'reads="{real.reads}"' in example
    assert all(field in example for field in real.fields)


def test_the_exit_codes_are_listed() -> None:
    assert re.findall(r"^\| (\d) \|", DOCUMENT, flags=re.M) == ["0", "3", "1", "2"]
