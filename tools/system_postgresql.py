"""Prints the bin directory of the oldest supported PostgreSQL that this system has installed.

The oldest, since it is furthest from the embedded one. Prints nothing where there is none.
"""

from __future__ import annotations

from howdah.embedded.binaries import OLDEST_VERSION, Binaries, _system_directories


def main() -> None:
    found = [Binaries(directory.resolve()) for directory in _system_directories()]
    usable = [each for each in found if each.version >= OLDEST_VERSION]
    if usable:
        print(min(usable, key=lambda each: each.version).directory)


if __name__ == "__main__":
    main()
