"""`howdah skill`: installs the agent skill where a coding agent finds it, and removes it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from howdah import __version__
from howdah import skill as skill_files
from howdah.cli.options import json_option
from howdah.errors import HowdahError, counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from howdah.skill import Change

NAME = skill_files.NAME
AGENTS = {"claude": ".claude", "cursor": ".cursor", "openclaw": ".openclaw"}
COLORS = {"added": "green", "updated": "green", "overwritten": "red", "removed": "red"}
OPENCLAW_NOTE = (
    "OpenClaw reads the skills/ directory of its workspace. Add .openclaw/skills to its setting "
    "skills.load.extraDirs, or install with --dir skills."
)


def copy_options(command: Any) -> Any:
    """Which copy a command changes, and how."""
    options = [
        click.option("--agent", type=click.Choice(list(AGENTS)), help="The agent.  [default: claude]"),
        click.option("--project", is_flag=True, help="In this directory instead of your home."),
        click.option("--dir", "parent", type=click.Path(path_type=Path, file_okay=False),
                     help=f"The skills directory of any other agent; {NAME} is created in it."),
        click.option("--force", is_flag=True, help="Also overwrite or remove edited files."),
        click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done."),
        json_option,
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.group(short_help="Install the skill for coding agents.")
def skill() -> None:
    """The skill that teaches a coding agent to set up and use Howdah."""


@skill.command()
@copy_options
def install(
    agent: str | None, project: bool, parent: Path | None, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Install the skill, or bring a copy up to date.

    The copy is skills/postgres-job-queue in .claude, .cursor or .openclaw of your home directory, or with
    --project of this directory. Claude Code and Cursor read both. OpenClaw reads the one in your home; in
    a project it reads the skills/ directory of its workspace, so use --dir skills there.

    The differences from an older copy are printed. Files that were edited since they were installed are
    kept, unless --force is given.
    """
    directory = _directory(agent, project, parent)
    with _os_errors(directory):
        changes = skill_files.install(directory, __version__, force=force, dry_run=dry_run)
    if as_json:
        return _print_json(directory, changes, dry_run)
    _print_changes(changes)
    if kept := sum(change.action == "kept" for change in changes):
        them = "it" if kept == 1 else "them"
        click.echo(f"Kept {counted(kept, 'edited file')}; --force overwrites {them}.")
    state = "Nothing was written" if dry_run else f"Version {__version__} is installed"
    click.echo(f"{state}: {directory}")
    if agent == "openclaw" and project:
        click.echo(OPENCLAW_NOTE)
    return None


@skill.command()
@copy_options
def uninstall(
    agent: str | None, project: bool, parent: Path | None, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove a copy, except for files that were edited or added."""
    directory = _directory(agent, project, parent)
    if not directory.exists():
        raise HowdahError(f"the skill is not installed in {directory}.")
    with _os_errors(directory):
        changes = skill_files.uninstall(directory, force=force, dry_run=dry_run)
    if as_json:
        return _print_json(directory, changes, dry_run)
    _print_changes(changes)
    left = "Nothing was removed" if dry_run else "Kept"
    return click.echo(f"{left if directory.exists() else 'Removed'}: {directory}")


@skill.command()
@json_option
def path(as_json: bool) -> None:
    """Print the directory of the skill in the howdah package."""
    source = str(skill_files.SOURCE)
    files = list(skill_files.shipped_files())
    click.echo(json.dumps({"path": source, "files": files}) if as_json else source)


@skill.command("list", short_help="List where the skill is installed.")
@json_option
def list_command(as_json: bool) -> None:
    """List the directories of the agents, and whether the skill is installed there."""
    copies = []
    for agent in AGENTS:
        for project in (False, True):
            place = _directory(agent, project, None)
            row = {"agent": agent, "project": project, "directory": str(place)}
            copies.append(row | {"state": _state(place)})
    if as_json:
        return click.echo(json.dumps(copies))
    for copy in copies:
        click.echo(f"{copy['agent']:<9} {copy['state']:<14} {copy['directory']}")
    return None


def _directory(agent: str | None, project: bool, parent: Path | None) -> Path:
    if parent is None:
        base = Path.cwd() if project else Path.home()
        return base / AGENTS[agent or "claude"] / "skills" / NAME
    if agent is not None or project:
        raise click.UsageError("--dir cannot be used with --agent or --project.")
    parent = parent.expanduser().absolute()
    return parent if parent.name == NAME else parent / NAME


def _state(directory: Path) -> str:
    if not (directory / "SKILL.md").is_file():
        return "not installed"
    with _os_errors(directory):
        changes = skill_files.install(directory, __version__, dry_run=True)
    actions = {change.action for change in changes}
    return "edited" if "kept" in actions else "up to date" if actions == {"same"} else "outdated"


@contextlib.contextmanager
def _os_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        raise HowdahError(f"cannot use {where}: {error.strerror}.") from error


def _print_changes(changes: Sequence[Change]) -> None:
    for change in changes:
        if change.action != "same":
            color = COLORS.get(change.action, "yellow")
            click.echo(f"{click.style(change.action, fg=color)} {change.path}")
        if change.diff:
            click.echo(change.diff)


def _print_json(directory: Path, changes: Sequence[Change], dry_run: bool) -> None:
    click.echo(json.dumps({
        "skill": NAME, "version": __version__, "directory": str(directory), "dry_run": dry_run,
        "files": [change._asdict() for change in changes],
    }))  # fmt: skip
