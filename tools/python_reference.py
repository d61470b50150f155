"""Writes the signatures in docs/reference/python.md: every ```pyi block under a heading that is a name in
`howdah.__all__` is generated from the source. The text around the blocks is written by hand.

    python tools/python_reference.py
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import howdah

PAGE = Path(__file__).parents[1] / "docs/reference/python.md"
WITHOUT_CONSTRUCTOR = ("Context", "Task")
"""Classes that only Howdah creates instances of."""
_SECTION = re.compile(r"^### `(?P<name>\w+)`\n(?P<text>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```pyi\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sections(page: str) -> dict[str, str]:
    """The text under each heading that is a name."""
    return {match["name"]: match["text"] for match in _SECTION.finditer(page)}


def declaration(name: str) -> str | None:
    """A public name as a stub, with the docstrings of its functions; None for a plain value."""
    value = getattr(howdah, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return None
    module = importlib.import_module(value.__module__)
    nodes = ast.parse(inspect.getsource(module)).body
    node = next(node for node in nodes if getattr(node, "name", None) == name)
    stub = _class(node) if isinstance(node, ast.ClassDef) else _function(node)
    return ast.unparse(_Constants(vars(module)).visit(stub))


def _class(node: ast.ClassDef) -> ast.ClassDef:
    members: dict[str, ast.stmt] = {}
    for member in node.body:
        match member:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if not name.startswith("_") or (
                    name == "__init__" and node.name not in WITHOUT_CONSTRUCTOR
                ):
                    members[name] = _function(
                        member
                    )  # of overloads, the last one is the implementation
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                members[name] = member
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
                members[name] = member
    bases = [base for base in node.bases if ast.unparse(base) != "msgspec.Struct"]
    body = list(members.values()) or [ast.Expr(ast.Constant(...))]
    return ast.ClassDef(node.name, bases, [], body, [], **_TYPE_PARAMETERS)


def _function(node: Any) -> ast.stmt:
    kept = [d for d in node.decorator_list if ast.unparse(d) in ("property", "classmethod")]
    text = ast.get_docstring(node)
    body: list[ast.stmt] = [ast.Expr(ast.Constant(text or ...))]
    function: ast.stmt = type(node)(
        node.name, node.args, body, kept, node.returns, lineno=0, **_TYPE_PARAMETERS
    )
    return function


class _Constants(ast.NodeTransformer):
    """Replaces named constants by their numbers."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def _resolve(self, node: Any) -> Any:
        with contextlib.suppress(Exception):
            value = eval(ast.unparse(node), self._names)  # noqa: S307 - our own source
            if type(value) in (int, float):
                return ast.Constant(value)
        return self.generic_visit(node)

    visit_Name = visit_Attribute = _resolve


_TYPE_PARAMETERS: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}


def with_signatures(page: str) -> str:
    """The page with the current signatures."""

    def replace(match: re.Match[str]) -> str:
        text = declaration(match["name"])
        if text is None:
            return match[0]
        return _BLOCK.sub(lambda _: f"```pyi\n{_formatted(text)}```", match[0], count=1)

    return _SECTION.sub(replace, page)


def _formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100"]
    done = subprocess.run(
        [*command, "--stdin-filename", "page.pyi", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    PAGE.write_text(with_signatures(PAGE.read_text()))
