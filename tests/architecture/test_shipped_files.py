"""Recipes parse, documents describe today."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from headrace.cli import app
from headrace.cli.default_group import DefaultGroup
from headrace.config.document import PAGES as GENERATED
from headrace.config.document import render
from headrace.config.load import load_document, load_recipe, parse_override
from headrace.config.schema import RunConfig
from headrace.envs.registry import build_task
from headrace.planner.spec import PlanSpec

ROOT = Path(__file__).parents[2]
SPECS = sorted(ROOT.glob("examples/plans/*.toml"))
RECIPES = sorted({*ROOT.glob("recipes/**/*.toml"), *ROOT.glob("examples/**/*.toml")} - set(SPECS))
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_recipe_loads(path: Path) -> None:
    config = load_recipe(path)
    assert config.recipe_dir == path.parent


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_spec_loads(path: Path) -> None:
    assert load_document(PlanSpec, path, what="spec").model_fields_set


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_recipe_has_its_task(path: Path) -> None:
    config = load_recipe(path)
    task = build_task(config.env, seed=config.seed, recipe_dir=config.recipe_dir)
    assert len(task.train) >= config.flow.batch_groups
    assert len(task.eval) <= config.env.eval_prompts


@pytest.mark.parametrize("name", GENERATED)
def test_settings_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == render(name), "run `make docs`"


def shell_lines(page: Path) -> list[str]:
    """Commands in a page's sh blocks, continuation lines joined."""
    blocks = [body for language, body in BLOCK.findall(page.read_text(encoding="utf-8")) if language in ("sh", "bash")]
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def headrace_commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for line in shell_lines(page):
            words = shlex.split(line, comments=True)
            if words and words[0] == "headrace":
                found.append((page.relative_to(ROOT).as_posix(), words[1:]))
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(("page", "words"), headrace_commands(), ids=lambda v: v if isinstance(v, str) else " ".join(v))
def test_commands_in_documents_exist(page: str, words: list[str]) -> None:
    command = typer.main.get_command(app)
    while commands := getattr(command, "commands", {}):
        if isinstance(command, DefaultGroup) and (not words or words[0] not in commands):
            words = [command.default, *words]
        if not words or words[0] not in commands:
            break
        command, words = commands[words[0]], words[1:]
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"-h", "--help", "--debug"}
    unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in options]
    assert not unknown, f"{page}: no option {unknown}"
    assert not getattr(command, "commands", {}) or not words or words[0].startswith("-"), f"{page}: no command {words}"
    for flag, value in itertools.pairwise(words):
        if flag == "--set":
            parse_override(value)
    for word in words:
        if word.endswith(".toml") and word.startswith(("recipes/", "examples/")):
            assert (ROOT / word).is_file(), f"{page}: there is no {word}"


def test_make_targets_in_documents_exist() -> None:
    targets = make_targets()
    named = [(p.name, w) for p in PAGES for w in re.findall(r"\bmake ([a-z-]+)\b", "\n".join(shell_lines(p)))]
    assert named
    assert [n for n in named if n[1] not in targets] == []


def test_toml_in_documents_is_settings() -> None:
    """TOML blocks parse, and their tables and keys are settings of today: of a recipe, or of a spec in planner.md."""
    for page in PAGES:
        schema = PlanSpec if page.name == "planner.md" else RunConfig
        for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "toml":
                for key, value in tomllib.loads(body).items():
                    assert key in schema.model_fields, f"{page.name}: {key}"
                    section = schema.model_fields[key].annotation
                    known = getattr(section, "model_fields", None)
                    if known is not None:
                        assert set(value) <= set(known), f"{page.name}: [{key}] {set(value) - set(known)}"


def test_python_in_documents_compiles() -> None:
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "python":
                # Top-level await is allowed: documents show the inside of an async function.
                compile(body, page.name, "exec", flags=0x2000)


def test_links_in_documents_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_agents_file_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_shipped_files_name_no_machine() -> None:
    """No local paths or private indexes in what is published."""
    files = [ROOT / "constraints.txt", ROOT / "Makefile", ROOT / "pyproject.toml", *PAGES, *RECIPES, *SPECS]
    private = re.compile(r"file://|/root/|/home/|/opt/|/work/|@ ")
    assert [f.name for f in files if private.search(f.read_text(encoding="utf-8"))] == []
