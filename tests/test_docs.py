"""The documents are true: their commands exist, their paths exist, and their tables say what the code says."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from lab.env import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def snippets(name: str) -> list[str]:
    """Inline code and lines of fenced blocks."""
    document = text(name)
    fenced = re.findall(r"^```\w*\n(.*?)^```", document, flags=re.M | re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", document, flags=re.M | re.S))
    return [*inline, *(line for block in fenced for line in block.splitlines())]


def lines() -> list[str]:
    """Every whole command line of the lab in the documents' blocks, and inline where it stands alone."""
    found = set()
    for name in DOCUMENTS:
        for snippet in snippets(name):
            if match := re.match(r"\s*(?:\.venv/bin/)?(eagle3-lab [^#\\]*?)(?:\s+#.*)?$", snippet):
                found.add(match[1])
    return sorted(found)


def parse(line: str) -> list[Any]:
    """Give a line to the real command line's own parser, part by part, and run nothing; the contexts, outermost first."""
    from lab import cli

    words = shlex.split(line)[1:]
    app = cli.app
    if words[0] in cli.PARTS:
        app = importlib.import_module(cli.PARTS[words[0]][0]).app
        words = words[1:]
    command, contexts, name = typer.main.get_command(app), [], "eagle3-lab"
    while True:
        nested = hasattr(command, "commands")
        context = command.make_context(name, list(words), parent=contexts[-1] if contexts else None)
        contexts.append(context)
        if not nested:
            return contexts
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        if command is None:
            raise ValueError(line)


def outcome(line: str) -> tuple[str, object]:
    """What the parser makes of a line: "parsed", or the kind of error and the error."""
    try:
        return "parsed", parse(line)
    except SystemExit as ending:
        return "Exit" if ending.code == 0 else "SystemExit", ending
    except Exception as error:  # noqa: BLE001 - click's errors, of which typer carries its own copy
        return type(error).__name__, error


def make_targets() -> list[str]:
    found = {match for name in DOCUMENTS for line in snippets(name) for match in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)", line)}
    return sorted(found)


def commands() -> list[str]:
    found = {
        match
        for name in DOCUMENTS
        for line in snippets(name)
        for match in re.findall(r"(?:^|[\s/])eagle3-lab ((?:bench|train) [a-z]+|[a-z][a-z-]*)", line)
    }
    return sorted(found)


@pytest.mark.parametrize("target", make_targets())
def test_make_targets_exist(target: str) -> None:
    result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command: str) -> None:
    code = "import sys; sys.argv[0] = 'eagle3-lab'; from lab.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, *command.split(), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert f"eagle3-lab {command}" in " ".join(result.stdout.split())


@pytest.mark.parametrize("line", lines())
def test_command_lines_parse(line: str) -> None:
    """Options, choices and arguments are known to the command. A mention of nothing but its name may leave its arguments out."""
    kind, error = outcome(line)
    named_only = not re.search(r"eagle3-lab( [a-z]+)+ [^a-z ]", line) and kind == "MissingParameter"
    assert kind in ("parsed", "Exit", "NoArgsIsHelpError") or named_only, f"{line}: {error}"


WRONG = (
    "serve --drafts bf16",
    "bench nothing",
    "duel --kind",
    "serve --tp many",
    "trace --temperature hot x",
    "workshop --port 0",
    "frobnicate",
)


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_line_would_be_noticed(words: str) -> None:
    assert outcome(f"eagle3-lab {words}")[0] not in ("parsed", "Exit", "NoArgsIsHelpError", "MissingParameter")


#: Lines that run in a second or two and change nothing.
CHEAP = ("--dry-run", "doctor")


@pytest.mark.parametrize("line", [line for line in lines() if any(word in line.split() for word in CHEAP) and "http" not in line])
def test_cheap_command_lines_run(line: str, tmp_path: Path) -> None:
    if re.search(r"\b[A-Z]{4,}\b", line):
        pytest.skip("a placeholder stands for a name")
    code = "import sys; sys.argv[0] = 'eagle3-lab'; from lab.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, *shlex.split(line)[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode in ((0, 3) if "doctor" in line else (0,)), result.stderr[-2000:]  # 3: the doctor found an error
    assert result.stdout.strip()


def test_the_documents_name_the_two_commands_first() -> None:
    code = re.search(r"^```bash\n(.*?)^```", text("README.md"), flags=re.M | re.S)
    assert code
    assert [line.split("#")[0].strip() for line in code[1].splitlines()] == ["make lab", "make test"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_images_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", text(name))
    folder = (ROOT / name).parent
    gone = [target for target in targets if not target.startswith(("http", "#")) and not (folder / target.partition("#")[0]).exists()]
    assert not gone


def folder_map() -> list[str]:
    block = re.search(r"^```text\n(.*?)^```", text("README.md"), flags=re.M | re.S)
    assert block
    paths, parents = [], [""]
    for line in block[1].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents = parents[: depth + 1]
        paths.append(parents[depth] + name)
        parents.append(parents[depth] + name)
    return paths


def test_the_folder_map_is_true_and_complete() -> None:
    named = folder_map()
    assert not [path for path in named if not ((ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file())]
    parts = {f"lab/{entry.name}/" for entry in (ROOT / "lab").iterdir() if (entry / "__init__.py").exists()}
    parts |= {f"lab/{entry.name}" for entry in (ROOT / "lab").glob("*.py") if entry.name != "__init__.py"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    top = {f"{path.partition('/')[0]}/" for path in tracked if "/" in path and not path.startswith(".")}
    assert not (parts | top) - set(named)


def test_the_settings_table_is_the_codes() -> None:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in SETTINGS.items()]
    table = re.search(r"^## Settings\n\n\| Variable \| Meaning \|\n\|---\|---\|\n(.*?)\n\n", text("README.md"), flags=re.M | re.S)
    assert table
    assert table[1].splitlines() == rows, "the table has to be:\n" + "\n".join(rows)


def test_every_setting_that_is_read_is_in_the_table() -> None:
    read = set()
    for path in [ROOT / "app.py", *(ROOT / "lab").rglob("*.py")]:
        read |= set(re.findall(r"EAGLE3_LAB_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
    assert read == set(SETTINGS)


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    makefile = text("Makefile")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.M)
    assert phony
    assert set(re.findall(r"^make ([a-z-]+)", listed, flags=re.M)) == set(phony[1].split())


def test_measured_numbers_have_their_place() -> None:
    assert re.search(r"^<!-- results -->\n.+?^<!-- /results -->$", text("README.md"), flags=re.M | re.S)


def test_the_tables_say_what_the_shipped_sweep_holds() -> None:
    """Numbers in the README and in docs/measured.md against the rows that were measured, and the published ones against their files."""
    from lab.bench import overlay, published, reports

    said = {name: text(name) for name in ("README.md", "docs/measured.md")}
    for name, rows in reports.sweeps().items():
        groups = {group.kind: group for group in overlay.groups(rows)}
        for kind in ("bf16", "fp8"):
            cells = [f"{spot.y:.2f}x [{spot.low:.2f}, {spot.high:.2f}]" for spot in overlay.speed_up(groups[kind], groups["none"])]
            assert len(cells) == 6
            for where, words in said.items():
                assert " | ".join(cells) in words.replace("**", ""), f"{name}, {kind}, in {where}"
        speeds = " | ".join(f"{spot.y:,.0f}" for spot in overlay.throughput(groups["none"]))
        assert speeds in said["docs/measured.md"], name
    for table in published.tables().values():
        for series in table.series:
            printed = [f"*{point.speedup:.2f}x*" for point in series.points if point.speedup is not None]
            assert " | ".join(printed) in said["README.md"], f"{table.name}, {series.label}"


def recipe_row(name: str) -> str:
    """A recipe's row in docs/recipes.md."""
    from lab import recipes
    from lab.recipes.model import Checkpoint, Hub

    def of(checkpoint: Checkpoint) -> str:
        return f"`{checkpoint.weights.repo}`" if isinstance(checkpoint.weights, Hub) else f"{checkpoint.name} (shipped)"

    recipe = recipes.get(name)
    drafts = [f"{kind.upper()} {of(draft)} (K={recipe.default_k(kind)})" for kind, draft in recipe.drafts.items()]
    sizes = " or ".join(map(str, recipe.tp)) or "1"
    return f"| `{name}` | {of(recipe.target)} | {', '.join(drafts) or 'none published'} | {', '.join(recipe.hardware) or 'CPU'} | {sizes} |"


def test_the_recipes_table_is_the_code_s() -> None:
    from lab import recipes

    rows = [recipe_row(name) for name in recipes.RECIPES]
    table = re.search(r"^\| Recipe \|.*?\n\|---.*?\n(.*?)\n\n", text("docs/recipes.md"), flags=re.M | re.S)
    assert table
    assert table[1].splitlines() == rows, "the table has to be:\n" + "\n".join(rows)


def test_the_commands_of_the_guides_are_understood() -> None:
    """Every `eagle3-lab serve` line is tried with --dry-run, and the files of servers that docs/attach.md shows are read."""
    import tomllib

    from typer.testing import CliRunner

    from lab.cli import app
    from lab.serving.attach import FIELDS, NAMES
    from lab.serving.command import MIDDLEWARE, SCHEDULER

    lines = [line.split("#")[0].split() for name in ("docs/recipes.md", "docs/attach.md") for line in snippets(name)]
    served = [words[1:] for words in lines if words[:2] == ["eagle3-lab", "serve"] and "NAME" not in words]
    assert len(served) >= 5
    for words in served:
        result = CliRunner().invoke(app, [*words, *(() if "--dry-run" in words else ("--dry-run",))])
        assert result.exit_code == 0, (words, result.output, result.exception)
    guide = text("docs/attach.md")
    block = re.search(r"^```toml\n(.*?)^```", guide, flags=re.M | re.S)
    assert block
    entries = tomllib.loads(block[1])
    assert {*entries} <= {*NAMES}
    assert {field for entry in entries.values() for field in entry} <= {*FIELDS}
    assert SCHEDULER in guide
    assert MIDDLEWARE in guide
