"""The agent skill: its code blocks run, its scripts work, and it is installed for agents."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from reading import Agent, blocks, variables

from howdah.cli import main
from howdah.embedded import EmbeddedServer
from howdah.skill import MANIFEST, NAME, SOURCE, install, shipped_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = sorted(SOURCE.rglob("*.md"))
FILES = {
    "README.md",
    "SKILL.md",
    "references/operations.md",
    "references/patterns.md",
    "references/schema.md",
    "scripts/quick_demo.py",
    "scripts/setup.py",
}


def load(tool: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(tool, ROOT / f"tools/{tool}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def relative(page: Path) -> str:
    return str(page.relative_to(SOURCE))


@pytest.fixture
def project() -> Iterator[Path]:
    """An empty project. Not in pytest's tmp_path, which the server of root cannot enter."""
    with tempfile.TemporaryDirectory(prefix="howdah-skill-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
        EmbeddedServer(Path(name) / ".howdah/pg18").remove()


@pytest.fixture
def home(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the project the current directory, and sets a temporary home directory."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(project / "home"))
    return project / "home"


def skill(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["skill", *arguments])
    assert done.exit_code == status, done.output
    return done.output


# ── the pages ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=relative)
def test_an_agent_can_follow_the_page(page: Path, project: Path, request: Any) -> None:
    environment = variables(project)
    if page.parent.name == "references":  # the others create a database
        environment["DATABASE_URL"] = request.getfixturevalue("database")
    if page.name == "SKILL.md":  # the README installs it itself
        install(project / f".claude/skills/{NAME}", "0")
    agent = Agent(project, environment)
    try:
        for block in blocks(page):
            agent.follow(block)
    finally:
        agent.leave()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_to_a_file_of_the_skill(page: Path) -> None:
    links = re.findall(r"\]\((?!#)([^)#]+)", page.read_text())
    outside = [
        link
        for link in links
        if not (page.parent / link).is_file()
        or SOURCE not in (page.parent / link).resolve().parents
    ]
    assert outside == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_command_that_the_text_names_exists(page: Path) -> None:
    text = page.read_text()
    for words in re.findall(r"(?:`|^\$ |\()howdah ([^`\n)]*)", text, re.MULTILINE):
        name, *arguments = words.split()
        command: Any = main.commands.get(name)
        assert command, f"howdah {words}"
        if hasattr(command, "commands"):
            command = command.commands[arguments[0]]
        known = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word for word in arguments if word.startswith("--") and word != "--"}
        assert used <= known, f"howdah {words}"


def test_every_name_that_the_text_imports_is_public() -> None:
    import howdah

    text = "".join(page.read_text() for page in PAGES)
    imported = ", ".join(re.findall(r"^from howdah import (.+)$", text, re.MULTILINE)).split(", ")
    assert set(imported) <= set(howdah.__all__)


def test_the_schema_page_and_the_database_have_the_same_columns_indexes_and_functions(
    connect: Any,
) -> None:
    page = (SOURCE / "references/schema.md").read_text()
    conn = connect()
    view = conn.execute("SELECT * FROM howdah.jobs LIMIT 0").description
    columns = page[page.index("## howdah.jobs") : page.index("```")]
    assert {column.name for column in view} <= set(re.findall(r"`(\w+)`", columns))
    text = page + (SOURCE / "SKILL.md").read_text()
    indexes = conn.execute(
        "SELECT indexname, indexdef FROM pg_indexes "
        "WHERE schemaname = 'howdah' AND tablename = 'live_jobs' AND indexdef LIKE '%% WHERE %%'",
        [],
    )
    for name, definition in indexes.fetchall():
        assert f"`{name}`" in text
        keys = re.search(r"USING btree \((.+?)\) WHERE", definition)
        assert keys
        assert keys[1] in page
    for name, parameters in re.findall(r"`(\w+)\((p_[^)]*)\)`", page):
        arguments = conn.execute(
            "SELECT pg_get_function_identity_arguments(oid) FROM pg_proc "
            "WHERE pronamespace = 'howdah'::regnamespace AND proname = %s",
            [name],
        ).fetchone()
        assert arguments, name
        existing = re.findall(r"p_\w+", arguments[0])
        documented = re.findall(r"p_\w+", parameters)
        assert existing[: len(documented)] == documented, name


def test_the_frontmatter_is_complete_and_names_the_triggers() -> None:
    text = (SOURCE / "SKILL.md").read_text()
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert head
    # Plain one-line scalars, which all YAML parsers read alike.
    pairs = [line.split(": ", 1) for line in head[1].splitlines()]
    assert [key for key, _ in pairs] == ["name", "model", "description"]
    fields = dict(pairs)
    assert not any(re.search(r": | #|^[\"'\[{&*!|>%@`]", value) for value in fields.values())
    assert fields["name"] == NAME == SOURCE.name
    assert fields["model"] == "standard"
    assert len(fields["description"]) <= 1024
    for trigger in (
        "PostgreSQL job queue", "background jobs", "task queue", "priority queue", "SKIP LOCKED",
    ):  # fmt: skip
        assert trigger in fields["description"]


def test_the_skill_is_short_and_has_no_local_paths_or_urls() -> None:
    assert len((SOURCE / "SKILL.md").read_text().splitlines()) < 250
    everything = b"".join(shipped_files().values()).decode()
    assert not re.search(r"/(?:work|home|root|Users)/|https?://", everything)


# ── the decision table ────────────────────────────────────────────────────────────────────────────


def table(page: str) -> list[list[str]]:
    text = page[page.index("| You need |") :].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]]


def test_every_figure_of_the_table_comes_from_the_benchmark() -> None:
    figures = load("skill_figures")
    page = figures.PAGE.read_text()
    results = json.loads(figures.RESULTS.read_text()) if figures.RESULTS.exists() else {}
    assert figures.fill(page, results) == page, "run `make skill-figures`"
    without = table(figures.fill(page, {}))
    assert [row[0] for row in without] == [
        "Guaranteed delivery",
        "Sub-millisecond latency",
        "Under 1,000 jobs/s",
        "Over 10,000 jobs/s",
        "Strict ordering",
    ]
    assert [cell for row in without for cell in row[1:] if re.search(r"\d", cell)] == []


def test_figures_are_added_replaced_and_removed() -> None:
    figures = load("skill_figures")
    bare = figures.fill(figures.PAGE.read_text(), {})
    first = figures.fill(bare, {"howdah": {"jobs_per_second": 41234.5, "pickup_p50_ms": 1.26}})
    assert "process. Measured: 41,234 jobs/s with one worker process. |\n" in first
    assert "Redis. Measured: 1.3 ms from the call to the start, idle worker. |\n" in first
    assert first.count("Measured:") == 2
    second = figures.fill(first, {"howdah": {"jobs_per_second": 9}})
    assert second.count("Measured:") == 1
    assert figures.fill(second, {}) == bare


# ── the scripts ───────────────────────────────────────────────────────────────────────────────────


def test_the_setup_script_sets_up_an_empty_project_and_runs_the_demo(
    project: Path, empty_database: str
) -> None:
    """On an existing server; the pages run it on an embedded one."""
    scripts = project / "elsewhere"
    shutil.copytree(SOURCE / "scripts", scripts)
    agent = Agent(project, variables(project) | {"DATABASE_URL": empty_database})
    output = agent.run("python elsewhere/setup.py")
    assert "database: the one in the environment" in output
    assert "wrote jobs.py" in output
    assert re.search(r"^demo-call +100 +completed +100 +2 +answered at", output, re.MULTILINE)
    made = {path.name for path in project.iterdir()}
    assert made == {"elsewhere", "jobs.py"}
    assert {path.name for path in scripts.iterdir()} == {"quick_demo.py", "setup.py"}

    # The example works, and the user's edits are kept.
    example = project / "jobs.py"
    example.write_text(example.read_text().replace(" px", " pixels"))
    assert "kept jobs.py" in agent.run("python elsewhere/setup.py --no-demo")
    (project / "try_it.py").write_text(
        "from howdah.testing import drain\nfrom jobs import app, resize\n"
        "handle = resize.enqueue('a.png')\ndrain(app)\nprint(handle.result(timeout=5))\napp.close()\n"
    )
    assert agent.run("python try_it.py") == "a.png at 400 pixels\n"


def test_without_howdah_the_setup_script_would_install_it(project: Path) -> None:
    scripts = project / "elsewhere"
    shutil.copytree(SOURCE / "scripts", scripts)
    # The Python behind the virtual environment, without any installed package.
    outside = sys._base_executable  # type: ignore[attr-defined]

    def plan(script: Path, *arguments: str, **more: str) -> list[str]:
        done = subprocess.run(
            [outside, "-S", str(script), "--plan", *arguments],
            cwd=project,
            env=variables(project) | more,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    local = f"{project.resolve()}/.venv/bin/python"
    assert plan(scripts / "setup.py") == [
        f"$ {outside} -m venv .venv",
        f"$ {local} -m pip install --quiet howdah[embedded]",
        f"$ {local} -m howdah db start",
        f"$ {local} -m howdah migrate",
        "write jobs.py",
        f"$ {local} {scripts.resolve()}/quick_demo.py",
    ]
    # An existing database needs no embedded server, and an existing jobs.py is kept.
    (project / "jobs.py").write_text("")
    options = ("--no-demo", "--package", "howdah.whl")
    assert plan(scripts / "setup.py", *options, DATABASE_URL="postgresql://db/shop")[1:] == [
        f"$ {local} -m pip install --quiet howdah.whl",
        f"$ {local} -m howdah migrate",
        "keep jobs.py",
    ]
    # From a checkout, the checkout is installed.
    assert plan(SOURCE / "scripts/setup.py")[1].endswith(f" {ROOT}[embedded]")
    assert {path.name for path in project.iterdir()} == {"elsewhere", "jobs.py"}


# ── installing ────────────────────────────────────────────────────────────────────────────────────


def content(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


@pytest.mark.parametrize("agent", ["claude", "cursor", "openclaw"])
def test_it_is_installed_for_a_user_or_a_project(home: Path, agent: str) -> None:
    assert "added SKILL.md\n" in skill("install", "--agent", agent)
    assert content(home / f".{agent}/skills/{NAME}") == shipped_files()
    output = skill("install", "--agent", agent, "--project")
    assert ("--dir skills" in output) == (agent == "openclaw")
    assert content(home.parent / f".{agent}/skills/{NAME}") == shipped_files()
    listed = [line.split(maxsplit=1)[0] for line in skill("list").splitlines() if "up to" in line]
    assert listed == [agent, agent]


def test_claude_is_the_default_and_dir_is_for_other_agents(home: Path) -> None:
    skill("install")
    skill("install", "--dir", "skills")
    skill("install", "--dir", f"other/{NAME}")
    for place in (home / ".claude/skills", home.parent / "skills", home.parent / "other"):
        assert content(place / NAME) == shipped_files()
    assert "--dir cannot be used with --agent or --project." in skill(
        "install", "--dir", "x", "--project", status=2
    )


def test_an_outdated_file_is_replaced_and_the_diff_printed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = shipped_files() | {"README.md": b"# old\n", "references/gone.md": b"gone\n"}
    monkeypatch.setattr("howdah.skill.shipped_files", lambda: old)
    skill("install")
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    assert "outdated" in skill("list")
    before = content(home / f".claude/skills/{NAME}")
    output = skill("install", "--dry-run")
    assert "Nothing was written" in output
    assert content(home / f".claude/skills/{NAME}") == before
    assert skill("install").splitlines()[:-1] == output.splitlines()[:-1]
    assert "updated README.md\n--- installed/README.md\n+++ howdah/README.md\n" in output
    assert "\n-# old\n+# postgres-job-queue\n" in output
    assert "removed references/gone.md" in output
    assert content(home / f".claude/skills/{NAME}") == shipped_files()
    assert skill("install").splitlines()[0].startswith("Version")  # no further change


def test_an_edited_file_is_kept_until_force_overwrites_it(home: Path) -> None:
    skill("install")
    page = home / f".claude/skills/{NAME}/SKILL.md"
    page.write_text(page.read_text() + "\nOur queue is called mail.\n")
    (page.parent / "notes.md").write_text("ours")
    assert "edited" in skill("list")
    for _ in range(2):  # the second time too
        output = skill("install")
        assert "kept SKILL.md\n--- installed/SKILL.md" in output
        assert "\n-Our queue is called mail.\n" in output
        assert "Kept 1 edited file; --force overwrites it.\n" in output
        assert page.read_text().endswith("mail.\n")
    assert "overwritten SKILL.md" in skill("install", "--force")
    assert content(page.parent) == shipped_files() | {"notes.md": b"ours"}


def test_a_copy_made_by_hand_counts_as_edited_where_it_differs(home: Path) -> None:
    place = home / f".claude/skills/{NAME}"
    shutil.copytree(SOURCE, place)
    (place / "README.md").write_text("another")
    assert [line.split()[:2] for line in skill("install").splitlines() if "kept" in line] == [
        ["kept", "README.md"]
    ]


def test_json_lists_the_action_for_every_file(home: Path) -> None:
    planned = json.loads(skill("install", "--dry-run", "--json"))
    assert planned["dry_run"] is True
    assert not home.exists()
    done = json.loads(skill("install", "--json"))
    assert done["directory"] == str(home / f".claude/skills/{NAME}")
    assert [(file["path"], file["action"]) for file in done["files"]] == [
        (path, "added") for path in shipped_files()
    ]
    assert json.loads(skill("path", "--json"))["files"] == list(shipped_files())
    assert skill("path") == f"{SOURCE}\n"
    states = {place["state"] for place in json.loads(skill("list", "--json"))}
    assert states == {"up to date", "not installed"}


def test_uninstall_keeps_files_that_the_user_edited_or_added(home: Path) -> None:
    assert "not installed" in skill("uninstall", status=1)
    skill("install")
    place = home / f".claude/skills/{NAME}"
    (place / "references/schema.md").write_text("ours")
    (place / "references/notes.md").write_text("ours too")
    assert "Nothing was removed" in skill("uninstall", "--dry-run")
    assert len(content(place)) == len(FILES) + 1
    assert "kept references/schema.md" in skill("uninstall")
    assert content(place) == {
        "references/schema.md": b"ours",
        "references/notes.md": b"ours too",
    }
    skill("uninstall", "--force")
    assert content(place) == {"references/notes.md": b"ours too"}
    (place / "references/notes.md").unlink()
    skill("install", "--force")
    assert f"Removed: {place}\n" in skill("uninstall")
    assert not place.exists()
    assert place.parents[1].exists()


def test_a_manifest_cannot_name_files_outside_of_the_copy(home: Path) -> None:
    skill("install")
    place = home / f".claude/skills/{NAME}"
    (home / "precious").write_text("ours")
    manifest = json.loads((place / MANIFEST).read_text())
    manifest["files"]["../../../precious"] = hashlib.sha256(b"ours").hexdigest()
    (place / MANIFEST).write_text(json.dumps(manifest))
    skill("install")
    skill("uninstall")
    assert (home / "precious").exists()
    assert not place.exists()


def test_force_replaces_a_link_and_leaves_the_file_that_it_leads_to(home: Path) -> None:
    skill("install")
    page = home / f".claude/skills/{NAME}/SKILL.md"
    (home / "precious").write_text("ours")
    page.unlink()
    page.symlink_to(home / "precious")
    assert "kept SKILL.md" in skill("install")
    assert page.is_symlink()
    assert "overwritten SKILL.md" in skill("install", "--force")
    assert page.read_bytes() == shipped_files()["SKILL.md"]
    assert (home / "precious").read_text() == "ours"


def test_it_is_not_installed_into_itself_or_over_a_file(home: Path) -> None:
    output = skill("install", "--dir", str(SOURCE), status=1)
    assert output == (
        f"Error: {SOURCE} is a symbolic link or Howdah's own copy of the skill; name another directory.\n"
    )
    (home.parent / "skills").write_text("")
    output = skill("install", "--dir", "skills", status=2)
    assert "is a file" in output


# ── shipping ──────────────────────────────────────────────────────────────────────────────────────


def test_the_repository_links_to_the_one_copy() -> None:
    assert shipped_files().keys() == FILES
    link = ROOT / "skills" / NAME
    assert link.resolve() == SOURCE.resolve()
    assert link.is_symlink()
    assert not link.readlink().is_absolute()


def test_the_zip_file_is_complete_and_the_same_each_time(tmp_path: Path) -> None:
    pack = load("skill_zip").pack
    pack(tmp_path / "dist/first.zip")
    pack(tmp_path / "second.zip")
    first = tmp_path / "dist/first.zip"
    assert first.read_bytes() == (tmp_path / "second.zip").read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = [f"{NAME}/{path}" for path in shipped_files()]
        assert archive.namelist() == names == sorted(names)
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.read(f"{NAME}/SKILL.md") == (SOURCE / "SKILL.md").read_bytes()


def test_the_sdist_and_the_wheel_made_from_it_have_the_skill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stdout + done.stderr:
        pytest.skip("the build needs hatchling, which is not available")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if f"/{NAME}/" in name}
    assert shipped == {f"howdah/skill/{NAME}/{path}" for path in FILES}
