"""Damaged files on the command line: no internal error, no crash, no hang, one line that says what is wrong.

    python benchmarks/fuzz.py plans|problems|modules|devices... [-n N] [--seed S] [--case K [-o FOLDER]]

Makes N cases of good files with something changed (`fuzz_cases.py`), and runs the command line's own entry on each in
a child that is forked from a process where everything is imported. A case fails where it ends with exit status 70 or
any that is not documented, with a traceback, by a signal, after the limit, with other than one line for bad input, or
with control characters on its output. `--case K` runs that case alone, and with `-o` writes its files and its command.
Exit status 1: some case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fuzz_cases import KINDS, TRAINED, Case, Good, case  # noqa: E402

GOOD_STATUS = (0, 1, 2)
MEMORY = 8 << 30
"""Bytes of address space that a case may take beyond what its parent has."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal acts on."""


@dataclass(frozen=True)
class Ran:
    """How one case ended: its exit status (negative: a signal; None: at the limit), and what it said."""

    status: int | None
    out: str
    error: str
    seconds: float

    @property
    def ended(self) -> str:
        """In a word."""
        if self.status is None:
            return "hang"
        return signal.Signals(-self.status).name if self.status < 0 else f"exit {self.status}"

    @property
    def wrong(self) -> str:
        """What is wrong with it; empty where nothing is."""
        lines = self.error.strip().splitlines()
        if self.status not in GOOD_STATUS:
            return f"{self.ended}: {(_last_error(lines) or lines or [''])[-1][:200]}"
        if "Traceback (most recent call last)" in self.error:
            return f"a traceback: {lines[-1][:200]}"
        if self.status == 2 and len(lines) != 1:
            return f"bad input said in {len(lines)} lines: {' | '.join(lines)[:200]}"
        if found := CONTROL.search(self.out) or CONTROL.search(self.error):
            return f"a control character on its output: {found[0]!r}"
        return ""


def _last_error(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]


def run(one: Case, folder: Path, limit: float) -> Ran:
    """Run a case in a forked child, in `folder`."""
    folder.mkdir(parents=True)
    for name, content in one.files.items():
        (folder / name).write_bytes(content)
    said, warned = folder / ".out", folder / ".err"
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        _be(one, folder, said, warned)
    status: int | None = None
    while True:
        done, waited = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(waited)
            break
        if time.perf_counter() - started > limit:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.002)
    seconds = time.perf_counter() - started
    return Ran(status, said.read_text(errors="replace"), warned.read_text(errors="replace"), seconds)


def _be(one: Case, folder: Path, said: Path, warned: Path) -> None:
    """Become the command; never returns."""
    status = 70
    try:
        os.setsid()
        for number, path in ((1, said), (2, warned)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if Path("/proc/self/statm").exists():
            held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        os.chdir(folder)
        from autoshard.cli import commands as cli

        try:
            cli.main(one.arguments)
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def prepare(scratch: Path) -> Good:
    """Good files, and all modules that a case imports: so each is forked with them."""
    code = (
        "import pickle, sys; from benchmarks.fuzz_cases import Good; good = Good.made()\n"
        "open(sys.argv[1], 'wb').write(pickle.dumps(good))\n"
    )
    made = scratch / "good.pickle"
    subprocess.run([sys.executable, "-c", code, str(made)], cwd=ROOT, check=True)
    import pickle

    good: Good = pickle.loads(made.read_bytes())
    (scratch / "step.mlir").write_bytes(TRAINED)
    (scratch / "plan.json").write_text(json.dumps(good.plan))
    code = (
        "import sys; from autoshard import cli\n"
        "for arguments in (['plan', 'step.mlir', '--mesh', '2x2', '--device', 'h100'],\n"
        "    ['show', 'plan.json', '--html', 'out.html'], ['lower', 'plan.json', 'step.mlir', '-o', 'out.mlir']):\n"
        "    try: cli.main(arguments)\n"
        "    except SystemExit: pass\n"
        "open('modules', 'w').write('\\n'.join(sys.modules))\n"
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=scratch,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path},
    )
    for name in (scratch / "modules").read_text().splitlines():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return good


def main() -> int:
    """Run the cases and say what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("-n", type=int, default=100, help="how many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds a case may take")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("-o", "--output", type=Path, help="with --case: a folder for its files and its command")
    asked = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    scratch = Path(tempfile.mkdtemp(prefix="autoshard-fuzz-"))
    try:
        good = prepare(scratch)
        return max(_run_all(kind, asked, good, scratch) for kind in asked.kinds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_all(kind: str, asked: argparse.Namespace, good: Good, scratch: Path) -> int:
    ended: Counter[str] = Counter()
    failed: dict[str, list[int]] = defaultdict(list)
    slowest = 0.0, 0
    for number in range(asked.n) if asked.case is None else [asked.case]:
        one = case(kind, asked.seed, number, good)
        folder = scratch / str(number)
        ran = run(one, folder, asked.limit)
        shutil.rmtree(folder)
        ended[ran.ended] += 1
        slowest = max(slowest, (ran.seconds, number))
        if ran.wrong:
            failed[re.sub(r"\d+", "#", ran.wrong)].append(number)
            print(f"case {number}: {ran.wrong}", flush=True)
        if asked.case is not None:
            print(f"autoshard {shlex.join(one.arguments)}\n{ran.ended}\n{ran.out[-2000:]}{ran.error[-4000:]}")
            if asked.output is not None:
                asked.output.mkdir(parents=True, exist_ok=True)
                for name, content in one.files.items():
                    (asked.output / name).write_bytes(content)
                (asked.output / "command").write_text(f"autoshard {shlex.join(one.arguments)}\n")
    cpu = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    print(f"{kind}, seed {asked.seed}: {', '.join(f'{count} {how}' for how, count in sorted(ended.items()))}")
    print(f"{sum(map(len, failed.values()))} failed; slowest {slowest[0]:.1f} s (case {slowest[1]}); {cpu:.0f} CPU s")
    for wrong, numbers in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"  {len(numbers)}: {wrong}\n    benchmarks/fuzz.py {kind} --seed {asked.seed} --case {numbers[0]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
