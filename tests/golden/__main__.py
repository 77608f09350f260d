"""Make the golden plans anew, and say which changed: `make golden`, or `python -m tests.golden NAME...` for some.

A file whose plan is the same, floats to the tolerance, is left as it is.
"""

from __future__ import annotations

import sys

from tests.golden import record
from tests.golden.programs import GOLDEN

SHOWN = 8
"""Differences of one plan that are listed."""


def main(names: list[str]) -> None:
    """Write the files that changed; with no names also remove those of no program."""
    if outside := record.outside_the_lock():
        sys.exit(f"golden plans are made in the locked environment: {outside}")
    for name in names or GOLDEN:
        new = record.record(GOLDEN[name].plan())
        if not record.path(name).exists():
            record.write(name, new)
            print(f"{name}: new, {record.figures(new)}", flush=True)
            continue
        old = record.read(name)
        found = record.differences(old, new)
        if not found:
            print(f"{name}: unchanged", flush=True)
            continue
        record.write(name, new)
        print(f"{name}: {len(found)} differences\n  {record.figures(old)} →\n  {record.figures(new)}")
        print(*(f"    {line}" for line in found[:SHOWN]), *["    …"] * (len(found) > SHOWN), sep="\n", flush=True)
    for file in () if names else record.FOLDER.glob("*.json.gz"):
        if file.name.removesuffix(".json.gz") not in GOLDEN:
            file.unlink()
            print(f"{file.name}: removed")


if __name__ == "__main__":
    main(sys.argv[1:])
