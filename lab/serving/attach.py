"""Servers that run elsewhere, as the operator names them: on the command line, in the environment, or in a TOML or JSON file.

Only these addresses are ever called: the page offers lanes, not a field for an address. A name is the lane that the server takes:
`baseline` (or `none`), `bf16`, `fp8`. An API key never stands in an address or a file: the file names the variable or the file that holds
it, and without either it is what VLLM_API_KEY holds. See docs/attach.md.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from lab import env, recipes
from lab.errors import LabError
from lab.recipes.model import Checkpoint, DraftChoice, Hub, Recipe

NAMES: Mapping[str, DraftChoice] = {"baseline": "none", "none": "none", "bf16": "bf16", "fp8": "fp8"}
FIELDS = ("url", "api_key_env", "api_key_file", "ca")
#: The longest context that is offered where the server decides it.
CONTEXT = 1 << 20


@dataclass(frozen=True)
class Address:
    """Where a server is: `url` without "/v1" at its end, a prefix kept. `ca` is a file of certificates to trust beside the system's."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    ca: str | None = None


def address(text: str, *, api_key: str | None = None, ca: str | None = None) -> Address:
    """The address in `text`; "http://" may be left out. Raises `LabError` for anything that is no plain http(s) address."""
    given = text.strip()
    url = given if "://" in given else f"http://{given}"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise LabError(f"'{_short(given)}' is no address.", why=str(error), todo="Write it like http://host:8000.") from error
    if parsed.userinfo:
        raise LabError(
            "An address must not hold a user name or password: it is shown on the page and kept in traces.",
            todo="Leave them out; a key goes into VLLM_API_KEY.",
        )
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise LabError(
            f"'{_short(given)}' is no address of a server.",
            why="It needs http:// or https:// and a host, and may have a port and a path; nothing after a '?' or '#'.",
            todo="Write it like http://host:8000 or https://host/prefix/v1.",
        )
    if ca is not None and not Path(ca).is_file():
        raise LabError(f"There is no certificate file {ca}.", todo="Name the CA's certificate in PEM form.")
    key = (api_key or os.environ.get("VLLM_API_KEY") or "").strip()
    if not (key.isascii() and key.isprintable()):  # refused here: what refuses it later repeats it
        raise LabError(
            f"The API key for {_short(given)} holds a character that no header may carry.",
            todo="Look for line breaks and letters beyond ASCII in VLLM_API_KEY, or where the file of servers says that the key is.",
        )
    return Address(url.rstrip("/").removesuffix("/v1").rstrip("/"), key or None, ca)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


def named(options: Sequence[str]) -> dict[DraftChoice, Address]:
    """Addresses from `name=URL` words."""
    found: dict[DraftChoice, Address] = {}
    for option in options:
        name, equals, url = option.partition("=")
        if not equals or not url:
            raise LabError(f"'{_short(option)}' does not say which lane the server takes.", todo="Write it like bf16=http://host:8000.")
        _put(found, name, address(url))
    return found


def _put(found: dict[DraftChoice, Address], name: str, where: Address) -> None:
    lane = NAMES.get(name.strip().lower())
    if lane is None:
        raise LabError(f"There is no lane called '{_short(name)}'.", todo=f"Name one of: {', '.join(NAMES)}.")
    if lane in found:
        raise LabError(f"Two servers are named for the lane '{name}'.", todo="Name one for each lane.")
    found[lane] = where


def from_file(path: Path) -> dict[DraftChoice, Address]:
    """Addresses from a TOML or JSON file with a table for each lane: `url`, and if need be `api_key_env` or `api_key_file`, and `ca`."""
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise LabError(f"The file of servers {path} cannot be read.", why=str(error), todo="See docs/attach.md for its form.") from error
    if not isinstance(content, dict) or not content:
        raise LabError(f"The file {path} names no server.", todo="See docs/attach.md for its form.")
    found: dict[DraftChoice, Address] = {}
    for name, entry in content.items():
        if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()) or "url" not in entry:
            raise LabError(f"'{_short(name)}' in {path} has no url.", todo="See docs/attach.md for the file's form.")
        if unknown := sorted({*entry} - {*FIELDS}):
            todo = f"Known are {', '.join(FIELDS)}."
            if "api_key" in unknown:
                todo = "Put the key into an environment variable and name that in api_key_env, or into a file and name it in api_key_file."
            raise LabError(f"'{name}' in {path} has an unknown field '{unknown[0]}'.", todo=todo)
        ca = entry.get("ca")
        _put(found, name, address(entry["url"], api_key=_key(entry, path), ca=None if ca is None else str(path.parent / ca)))
    return found


def _key(entry: Mapping[str, str], path: Path) -> str | None:
    if variable := entry.get("api_key_env"):
        key = os.environ.get(variable)
        if not key:
            raise LabError(f"The environment variable {variable} is not set.", why=f"{path} says that it holds an API key.")
        return key
    if file := entry.get("api_key_file"):
        try:
            return (path.parent / file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LabError(f"The key file {file} cannot be read.", why=type(error).__name__, todo=f"{path} names it.") from error
    return None


def addresses(options: Sequence[str] = ()) -> dict[DraftChoice, Address]:
    """Every server that the operator names: `options` (`--attach`), else EAGLE3_LAB_ATTACH. One option or the variable may be a file."""
    words = list(options) or [word for word in (env.attach() or "").replace(",", " ").split() if word]
    if len(words) == 1 and "=" not in words[0]:
        return from_file(Path(words[0]).expanduser())
    return named(words)


def chosen(name: str | None, options: Sequence[str] = ()) -> tuple[Recipe, dict[str, Address]]:
    """What a page is about: the recipe `name` with the named servers in place of its lanes, or without a name the servers alone (the
    default recipe where there are none); and the servers by address, for `Lanes`."""
    found = addresses(options)
    base = recipes.get(name or recipes.DEFAULT) if name or not found else None
    return recipe_of(found, base), {where.url: where for where in found.values()}


def recipe_of(found: Mapping[DraftChoice, Address], base: Recipe | None = None) -> Recipe:
    """A recipe whose lanes are these servers: all of them (without `base`), or in place of lanes of `base` that are started here."""
    remotes = {lane: where.url for lane, where in found.items()}
    if base is not None:
        return replace(base, remotes=remotes)
    if not found:
        raise LabError("No server is named.", todo="Use --attach bf16=URL, or EAGLE3_LAB_ATTACH.")
    return Recipe(
        name="attached",
        title="Servers that run elsewhere",
        target=Checkpoint("served elsewhere", Hub("")),
        drafts={},
        k=1,
        max_model_len=CONTEXT,
        remotes=remotes,
        elsewhere=True,
    )
