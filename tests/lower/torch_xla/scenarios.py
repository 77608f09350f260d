"""How a script runs its scenarios one by one in a process of its own, and leaves what each saw as JSON."""

import json
import sys
import traceback


def main(scenarios):
    """`python -m … OUT [NAME …]`: the scenarios called so, or all; one that fails leaves its traceback."""
    out, *wanted = sys.argv[1:]
    seen = {}
    for name in wanted or scenarios:
        try:
            seen[name] = scenarios[name]()
        except Exception:
            seen[name] = {"failed": traceback.format_exc()}
        with open(out, "w") as file:
            json.dump(seen, file)
