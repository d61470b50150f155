"""Prints the bin directory of the oldest supported PostgreSQL that is installed on this system.

The oldest, since it differs most from the embedded one. Prints nothing if none is installed.
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
