"""The skill that teaches a coding agent to use Howdah: its files, and how they get to an agent.

The files are in `postgres-job-queue/`. A copy carries a manifest with the hash of every file that was
written, which tells a file that the user edited from one that is merely old. Only the latter are
replaced or removed. Nothing here knows about agents; the command line says where to go.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from howdah.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "postgres-job-queue"
SOURCE = Path(__file__).parent / NAME
MANIFEST = ".howdah-skill.json"


class Action(StrEnum):
    """What happens to one file of a copy."""

    ADDED = "added"
    UPDATED = "updated"
    OVERWRITTEN = "overwritten"
    REMOVED = "removed"
    KEPT = "kept"
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A file of a copy, by its path within it, and the difference to the new one as a unified diff."""

    path: str
    action: Action
    diff: str = ""


def shipped_files() -> dict[str, bytes]:
    """What the skill consists of, by path within it, sorted."""
    found = (path for path in SOURCE.rglob("*") if path.suffix in (".md", ".py"))
    return {
        path.relative_to(SOURCE).as_posix(): path.read_bytes()
        for path in sorted(found)
        if "__pycache__" not in path.parts
    }


class Copy:
    """The skill in a directory of an agent's. Making one does nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def exists(self) -> bool:
        """Whether there is a copy, made by us or by hand."""
        return (self.directory / "SKILL.md").is_file()

    def plan(self, *, force: bool = False) -> list[Change]:
        """What `install` would do, file by file."""
        self._check()
        known, files = self._manifest(), shipped_files()
        changes = [self._compare(path, new, known.get(path), force) for path, new in files.items()]
        # What an older version had and this one has not.
        gone = [path for path in known if path not in files]
        return changes + self._drop({path: known[path] for path in gone}, force)

    def install(self, version: str, *, force: bool = False) -> list[Change]:
        """Bring the copy up to date; files that the user edited stay as they are unless `force`."""
        changes, files, known = self.plan(force=force), shipped_files(), self._manifest()
        hashes: dict[str, str] = {}
        for change in changes:
            path = change.path
            match change.action:
                case Action.ADDED | Action.UPDATED | Action.OVERWRITTEN:
                    _write(self.directory / path, files[path])
                case Action.REMOVED:
                    self._remove(path)
            if change.action is Action.KEPT:
                hashes |= {path: known[path]} if path in known else {}
            elif change.action is not Action.REMOVED:
                hashes[path] = _hash(files[path])
        manifest = {"skill": NAME, "version": version, "files": hashes}
        _write(self.directory / MANIFEST, f"{json.dumps(manifest, indent=2)}\n".encode())
        return changes

    def plan_removal(self, *, force: bool = False) -> list[Change]:
        """What `uninstall` would do, file by file."""
        self._check()
        known = {path: _hash(data) for path, data in shipped_files().items()} | self._manifest()
        return self._drop(known, force)

    def uninstall(self, *, force: bool = False) -> list[Change]:
        """Remove the copy, except for what the user edited or added."""
        changes = self.plan_removal(force=force)
        for change in changes:
            if change.action is Action.REMOVED:
                self._remove(change.path)
        self._remove(MANIFEST)
        return changes

    def _check(self) -> None:
        if self.directory.is_symlink() or self.directory.resolve() == SOURCE.resolve():
            raise InvalidOption(
                f"{self.directory} is a link or Howdah's own copy; name a directory of the agent's."
            )
        if self.directory.exists() and not self.directory.is_dir():
            raise InvalidOption(f"{self.directory} is not a directory.")

    def _compare(self, path: str, new: bytes, known: str | None, force: bool) -> Change:
        old = self._read(path)
        if old is None:
            return Change(path=path, action=Action.ADDED)
        if old == new:
            return Change(path=path, action=Action.SAME)
        edited = _hash(old) != known
        action = Action.UPDATED
        if edited:
            action = Action.OVERWRITTEN if force else Action.KEPT
        return Change(path=path, action=action, diff=_diff(path, old, new))

    def _drop(self, known: Mapping[str, str], force: bool) -> list[Change]:
        changes = []
        for path in sorted(known):
            old = self._read(path)
            if old is not None:
                edited = _hash(old) != known[path] and not force
                changes.append(Change(path=path, action=Action.KEPT if edited else Action.REMOVED))
        return changes

    def _read(self, path: str) -> bytes | None:
        try:
            return (self.directory / path).read_bytes()
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        target = self.directory / path
        target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: the rest is the user's
            for directory in (target.parent, *target.parent.parents):
                directory.rmdir()
                if directory == self.directory:
                    break

    def _manifest(self) -> dict[str, str]:
        """The hash of each file as it was installed; nothing where there is no readable manifest."""
        try:
            files = json.loads(self._read(MANIFEST) or b"{}")["files"]
            return {str(path): str(digest) for path, digest in files.items() if _is_within(path)}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}


def _is_within(path: str) -> bool:
    """Whether a manifest's path stays within the copy: what it names may be removed."""
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and path != MANIFEST


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _diff(path: str, old: bytes, new: bytes) -> str:
    before, after = (data.decode("utf-8", "replace").splitlines() for data in (old, new))
    lines = difflib.unified_diff(before, after, f"installed/{path}", f"howdah/{path}", lineterm="")
    return "\n".join(lines)


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, and never through a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".howdah-", delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
