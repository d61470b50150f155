"""Imports the app that a command names as `module:attribute`."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from howdah.app import App
from howdah.errors import InvalidOption, did_you_mean


def load_app(name: str) -> App:
    """Import the App at `module:attribute`, with the current directory on the Python path."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise InvalidOption(
            f'"{name}" does not name an app; write it as module:attribute, as in shop:app.'
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidOption(
                f'there is no module "{module_name}" in {here} or on the Python path.'
            ) from None
        raise InvalidOption(f'importing "{module_name}" failed: {error}.') from error
    except (Exception, SystemExit) as error:
        raise InvalidOption(
            f'importing "{module_name}" failed: {type(error).__name__}: {_format_error(error)}.'
        ) from error
    found = getattr(module, attribute, None)
    if isinstance(found, App):
        return found
    apps = [key for key, value in vars(module).items() if isinstance(value, App)]
    if found is not None:
        raise InvalidOption(f'"{name}" is not an App; its type is {type(found).__name__}.')
    hint = did_you_mean(attribute, apps) or (f"; it has {', '.join(apps)}." if apps else ".")
    raise InvalidOption(f'module "{module_name}" has no app named "{attribute}"{hint}')


def _format_error(error: BaseException) -> str:
    """The error's message, and the file and line that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    where = next(frame for frame in reversed(frames) if not frame.filename.startswith("<"))
    return f"{error} ({where.filename}:{where.lineno})"
