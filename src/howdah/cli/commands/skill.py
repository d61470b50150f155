"""`howdah skill`: puts the agent skill where a coding agent looks for it, and takes it away again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from howdah import __version__
from howdah.cli.options import json_option
from howdah.errors import HowdahError
from howdah.skill import NAME, SOURCE, Action, Change, Copy, shipped_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HOMES = {"claude": ".claude", "cursor": ".cursor", "openclaw": ".openclaw"}
COLOURS = {
    Action.ADDED: "green",
    Action.UPDATED: "green",
    Action.OVERWRITTEN: "red",
    Action.REMOVED: "red",
    Action.KEPT: "yellow",
}
OPENCLAW_NOTE = (
    "OpenClaw itself looks into skills/ of its workspace. Name .openclaw/skills in its setting "
    "skills.load.extraDirs, or install with --dir skills."
)


def place_options(command: Any) -> Any:
    """Which copy a command is about."""
    options: list[Callable[[Any], Any]] = [
        click.option("--agent", type=click.Choice(list(HOMES)), help="Whose skill.  [default: claude]"),
        click.option("--project", is_flag=True, help="In this directory instead of your home."),
        click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path, file_okay=False),
            help=f"A folder of skills, for any other agent; {NAME} is made in it.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def skill() -> None:
    """The skill that teaches a coding agent to set up and use Howdah."""


@skill.command()
@place_options
@click.option("--force", is_flag=True, help="Also overwrite files that were edited.")
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@json_option
def install(
    agent: str | None,
    project: bool,
    directory: Path | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Install the skill, or bring a copy up to date.

    It goes to skills/postgres-job-queue in .claude, .cursor or .openclaw of your home directory, or with
    --project of this one. Claude Code and Cursor read both places. OpenClaw reads the one in your home;
    in a project it reads skills/ of its workspace, so there use --dir skills.

    Over an older copy, the differences are shown. Files that were edited since they were installed are
    kept, unless --force is given.
    """
    copy = Copy(_place(agent, project, directory))
    with _in_words(copy):
        changes = copy.plan(force=force) if dry_run else copy.install(__version__, force=force)
    if as_json:
        return _print_json(copy, changes, dry_run)
    _print_changes(changes)
    kept = sum(change.action is Action.KEPT for change in changes)
    if kept:
        click.echo(f"Kept what you edited ({kept} files); --force overwrites it.")
    state = "Nothing was written" if dry_run else f"Version {__version__} is installed"
    click.echo(f"{state}: {copy.directory}")
    if agent == "openclaw" and project:
        click.echo(OPENCLAW_NOTE)
    return None


@skill.command()
@place_options
@click.option("--force", is_flag=True, help="Also remove files that were edited.")
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@json_option
def uninstall(
    agent: str | None,
    project: bool,
    directory: Path | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove a copy, except for files that were edited or added."""
    copy = Copy(_place(agent, project, directory))
    if not copy.directory.exists():
        raise HowdahError(f"the skill is not installed in {copy.directory}.")
    with _in_words(copy):
        changes = copy.plan_removal(force=force) if dry_run else copy.uninstall(force=force)
    if as_json:
        return _print_json(copy, changes, dry_run)
    _print_changes(changes)
    if copy.directory.exists():
        return click.echo(f"{'Nothing was removed' if dry_run else 'Left'}: {copy.directory}")
    return click.echo(f"Removed {copy.directory}")


@skill.command()
@json_option
def path(as_json: bool) -> None:
    """Print where Howdah's own copy of the skill is."""
    if as_json:
        return click.echo(json.dumps({"path": str(SOURCE), "files": list(shipped_files())}))
    return click.echo(str(SOURCE))


@skill.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the places of the agents, and what is there."""
    places = [
        {"agent": agent, "project": project, "directory": str(place), "state": _state(Copy(place))}
        for agent, project, place in _places()
    ]
    if as_json:
        return click.echo(json.dumps(places))
    for each in places:
        click.echo(f"{each['agent']:<9} {each['state']:<14} {each['directory']}")
    return None


def _places() -> Iterator[tuple[str, bool, Path]]:
    for agent in HOMES:
        for project in (False, True):
            yield agent, project, _place(agent, project, None)


def _place(agent: str | None, project: bool, directory: Path | None) -> Path:
    if directory is None:
        home = Path.cwd() if project else Path.home()
        return home / HOMES[agent or "claude"] / "skills" / NAME
    if agent is not None or project:
        raise click.UsageError("--dir goes with neither --agent nor --project.")
    directory = directory.expanduser().absolute()
    return directory if directory.name == NAME else directory / NAME


def _state(copy: Copy) -> str:
    if not copy.exists():
        return "not installed"
    with _in_words(copy):
        actions = {change.action for change in copy.plan()}
    if Action.KEPT in actions:
        return "edited"
    return "up to date" if actions == {Action.SAME} else "outdated"


@contextlib.contextmanager
def _in_words(copy: Copy) -> Iterator[None]:
    """The system's refusals as sentences."""
    try:
        yield
    except OSError as error:
        where = error.filename or copy.directory
        raise HowdahError(f"cannot use {where}: {error.strerror}.") from error


def _print_changes(changes: Sequence[Change]) -> None:
    for change in changes:
        if change.action is Action.SAME:
            continue
        click.echo(f"{click.style(change.action, fg=COLOURS[change.action])} {change.path}")
        if change.diff:
            click.echo(change.diff)


def _print_json(copy: Copy, changes: Sequence[Change], dry_run: bool) -> None:
    files = [
        {"path": change.path, "action": change.action, "diff": change.diff} for change in changes
    ]
    facts = {
        "skill": NAME,
        "version": __version__,
        "directory": str(copy.directory),
        "dry_run": dry_run,
        "files": files,
    }
    click.echo(json.dumps(facts))
