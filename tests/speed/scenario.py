"""How long does the default run take, and what does a further scenario of the same world cost beyond its saves?"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import median
from typing import NamedTuple

LIMIT_RUN_S = 60.0
LIMIT_SCENARIO_S = 1.0
RUNS = 3
_DEADLINE_S = 30 * 60
_END_S = 30
_CHECKOUT = Path(__file__).parents[2]


class Scenario(NamedTuple):
    """A test of the default run: its wall time (set-up, call, tear-down), and the part that its saves took."""

    name: str
    wall_s: float
    saves_s: float

    @property
    def beyond_s(self) -> float:
        return self.wall_s - self.saves_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="default runs (default: %(default)s)")
    parser.add_argument("options", nargs="*", help="further options for pytest, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    walls, further = [], []
    for number in range(options.runs):
        wall_s, scenarios = default_run(options.options)
        walls.append(wall_s)
        further += [scenario.beyond_s for scenario in scenarios[1:]]
        print(f"run {number + 1}: {wall_s:.1f} s", flush=True)
        for scenario in scenarios:
            print(
                f"  {scenario.name}: {scenario.wall_s:.2f} s, of them its saves {scenario.saves_s:.2f} s, "
                f"beyond them {scenario.beyond_s:.2f} s"
            )
    fell_short = False
    for what, values, limit in (
        ("default run", walls, LIMIT_RUN_S),
        ("further scenario beyond its saves", further, LIMIT_SCENARIO_S),
    ):
        beyond = median(values) >= limit
        fell_short |= beyond
        print(
            f"{what}: median {median(values):.2f} s, {min(values):.2f} to {max(values):.2f} s: "
            f"{'falls short' if beyond else 'within'} (limit {limit:.0f} s)"
        )
    return int(fell_short)


def default_run(options: list[str]) -> tuple[float, list[Scenario]]:
    """Run `pytest` in the checkout as a user does; its files go to a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="ckpt-speed-") as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "pytest", "-o", f"cache_dir={folder}/cache", f"--basetemp={folder}/tmp"),
            *(f"--junitxml={folder}/junit.xml", *options),
        ]
        began = time.monotonic()
        output, status = _run(command)
        wall_s = time.monotonic() - began
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {status}:\n{output}")
        rows = json.loads((folder / "cache" / "d" / "ckpt" / "last.json").read_text())["benchmarks"]
        tests = ET.parse(folder / "junit.xml").getroot().iter("testcase")
        return wall_s, [Scenario(t.get("name", ""), float(t.get("time", "nan")), _saves_s(t, rows)) for t in tests]


def _run(command: list[str]) -> tuple[str, int]:
    """Return output and exit status of `command`; let it clean up where this process is to end before it."""
    process = subprocess.Popen(command, cwd=_CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=_DEADLINE_S)
    except BaseException:
        process.terminate()
        process.communicate(timeout=_END_S)
        raise
    return output, process.returncode


def _saves_s(test: ET.Element, rows: list[dict[str, object]]) -> float:
    """Return the seconds of all saves of a test, the first one included."""
    record = next(row for row in rows if row["name"] == test.get("name"))["extra_info"]["ckpt"]  # type: ignore[index]
    return float(record["first_save_s"]) + sum(float(one["save_s"]) for one in record["rounds"])


if __name__ == "__main__":
    sys.exit(main())
