"""The skill that teaches a coding agent to use Howdah: its files, and copies of them for agents.

The files are in `postgres-job-queue/`. A copy has a manifest with the hash of each file as it was written.
A file with another hash was edited by the user, and is kept unless `force` is set. `howdah.cli`
decides which directory an agent reads.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from howdah.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "postgres-job-queue"
SOURCE = Path(__file__).parent / NAME
MANIFEST = ".howdah-skill.json"


class Change(NamedTuple):
    """One file of a copy: added, updated, overwritten, removed, kept or same."""

    path: str
    action: str
    diff: str = ""


def shipped_files() -> dict[str, bytes]:
    """The files of the skill by their path, sorted."""
    return {
        path.relative_to(SOURCE).as_posix(): path.read_bytes()
        for path in sorted(SOURCE.rglob("*"))
        if path.suffix in (".md", ".py") and "__pycache__" not in path.parts
    }


def install(
    directory: Path, version: str, *, force: bool = False, dry_run: bool = False
) -> list[Change]:
    """Create the copy in `directory`, or bring it up to date."""
    files, written = shipped_files(), _written_hashes(directory)
    changes = _plan(directory, files, written, force=force)
    if not dry_run:
        _apply(directory, files, changes)
        for change in changes:
            if change.action == "removed":
                del written[change.path]
            elif change.action != "kept":
                written[change.path] = _hash(files[change.path])
        manifest = {"skill": NAME, "version": version, "files": written}
        _write(directory / MANIFEST, f"{json.dumps(manifest, indent=2)}\n".encode())
    return changes


def uninstall(directory: Path, *, force: bool = False, dry_run: bool = False) -> list[Change]:
    """Remove the copy, except for files that the user edited or added."""
    written = {path: _hash(data) for path, data in shipped_files().items()}
    changes = _plan(directory, {}, written | _written_hashes(directory), force=force)
    if not dry_run:
        _apply(directory, {}, changes)
        _remove(directory, MANIFEST)
    return changes


def _plan(
    directory: Path, files: Mapping[str, bytes], written: Mapping[str, str], *, force: bool
) -> list[Change]:
    """What to do with each file of the copy so that it holds `files` and no other file that was written."""
    if directory.is_symlink() or directory.resolve() == SOURCE.resolve():
        raise InvalidOption(
            f"{directory} is a symbolic link or Howdah's own copy of the skill; name another directory."
        )
    changes = []
    for path in [*files, *sorted(written.keys() - files.keys())]:
        old, new = _read(directory / path), files.get(path)
        if old is None:
            if new is not None:
                changes.append(Change(path, "added"))
            continue
        edited = _hash(old) != written.get(path)
        if old == new:
            action = "same"
        elif edited and not force:
            action = "kept"
        elif new is None:
            action = "removed"
        else:
            action = "overwritten" if edited else "updated"
        diff = "" if new is None else _diff(path, old, new)
        changes.append(Change(path, action, diff))
    return changes


def _apply(directory: Path, files: Mapping[str, bytes], changes: list[Change]) -> None:
    for change in changes:
        if change.action == "removed":
            _remove(directory, change.path)
        elif change.action in ("added", "updated", "overwritten"):
            _write(directory / change.path, files[change.path])


def _written_hashes(directory: Path) -> dict[str, str]:
    """The manifest's hash of each file; empty if there is no readable manifest."""
    try:
        files = json.loads(_read(directory / MANIFEST) or b"{}")["files"]
        # A file named here may be removed, so a path that leads out of the copy is ignored.
        inside = directory.resolve()
        return {p: h for p, h in files.items() if (inside / p).resolve().is_relative_to(inside)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _diff(path: str, old: bytes, new: bytes) -> str:
    before, after = (data.decode("utf-8", "replace").splitlines() for data in (old, new))
    lines = difflib.unified_diff(before, after, f"installed/{path}", f"howdah/{path}", lineterm="")
    return "\n".join(lines)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(data)
    draft.replace(path)  # the whole file or nothing, and never through a link


def _remove(directory: Path, path: str) -> None:
    target = directory / path
    target.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a directory that is not empty holds files of the user
        while target != directory:
            target = target.parent
            target.rmdir()
