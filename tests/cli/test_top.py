"""`howdah top`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stage import Run, Shop

    from howdah import JobQueue


def test_piped_top_prints_one_frame(run_on_shop: Run) -> None:
    result = run_on_shop("top")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0][8:].startswith('  database "shop" at ')
    assert "3 due" in lines[1]
    assert "1 running" in lines[1]
    assert "1 scheduled  1 blocked" in lines[1]
    assert lines[2].startswith("completed ")
    assert "600 in 5 min" in lines[2]
    assert any(line.startswith("worker-1 ") for line in lines)
    assert run_on_shop("top", "--once").stdout.splitlines()[1] == lines[1]


def test_top_prints_a_frame_as_json(run_on_shop: Run, read_json: Any) -> None:
    [frame] = read_json(run_on_shop("top", "--json"))
    assert (frame["due"], frame["running"], frame["scheduled"], frame["blocked"]) == (3, 1, 1, 1)
    assert sum(frame["completed"]) == 600
    resize = next(lane for lane in frame["lanes"] if lane["job_type"] == "resize")
    assert sum(resize["ended"]) == 630
    assert [worker["worker_id"] for worker in frame["workers"]] == ["worker-1"]


@pytest.mark.parametrize(("width", "color"), [(60, False), (120, True)])
def test_top_refreshes_until_q_and_restores_the_terminal(
    terminal: Any, shop: Shop, width: int, color: bool
) -> None:
    variables = {} if color else {"NO_COLOR": "1"}
    seen = terminal("top", "--interval", "100ms", "--database", shop.url, width=width, height=20,
                    **variables)  # fmt: skip
    seen.read(until="worker-1", times=3)
    seen.type("q")
    assert seen.wait() == 0
    assert "Traceback" not in seen.text
    frame = seen.text[: seen.text.index("worker-1")]
    assert max(map(len, frame.splitlines())) <= width
    assert ("\x1b[32m" in seen.raw) == color
    assert seen.raw.endswith("\x1b[?25h\x1b[?1049l"), "cursor and screen are restored"


def test_ctrl_c_ends_top_without_an_error(terminal: Any, shop: Shop) -> None:
    seen = terminal("top", "--database", shop.url)
    seen.read(until="worker-1")
    seen.interrupt()
    assert seen.wait() == 0
    assert "Traceback" not in seen.text


def test_top_shows_only_the_rows_that_fit(terminal: Any, database: str, queue: JobQueue) -> None:
    queue.enqueue_many([(f"type-{n:03}", {}) for n in range(100)])
    seen = terminal("top", "--database", database, height=15)
    seen.read(until="more")
    seen.type("q")
    assert seen.wait() == 0
    assert "type-000" in seen.text
    assert "type-050" not in seen.text
