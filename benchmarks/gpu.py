"""What a machine with a GPU is used for, in order of value: each step in its time, and none twice.

    make gpu                                 # python benchmarks/gpu.py, in an hour at most
    python benchmarks/gpu.py --list          # the steps, and which of them are done

A step that ends well is noted in runs/gpu/done.json and left out the next time. One that is stopped by its limit is
called again, and continues where its own files say so (`jfcl reproduce` resumes its runs).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "gpu"


class Step(NamedTuple):
    """A command, and the minutes that it may take."""

    name: str
    command: list[str]
    minutes: float


PYTHON = [sys.executable]
REPRODUCE = [*PYTHON, "-m", "jfcl", "reproduce"]
TWO = ["--set", 'datasets=["mnist", "fashion_mnist"]']
STEPS = [
    Step("tests", [*PYTHON, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/test_gpu.py"], 3),
    Step("table 2 of Byzantine CFL", [*REPRODUCE, "byzantine_cfl.table2", "--full", *TWO, "--jobs", "5"], 20),
    Step("table 1 of IFCA", [*REPRODUCE, "ifca.table1", "--full"], 10),
    Step("table 1 of IFCA, CIFAR-10", [*REPRODUCE, "ifca.table1_cifar10", "--full", "--seeds", "1", "--jobs", "3"], 15),
    Step("predictions against measurements", [*PYTHON, "benchmarks/targets.py", "--here", "--largest", "2"], 8),
    Step("rounds beside PyTorch and FedJAX", [*PYTHON, "benchmarks/rounds.py"], 6),
    Step("convolutions of clients", [*PYTHON, "benchmarks/kernels.py", "--only", "layers"], 3),
    Step("figure 8 of CFL", [*REPRODUCE, "cfl.figure8", "--full"], 6),
]


def run_steps(steps: list[Step], folder: Path, minutes: float) -> dict[str, float]:
    """Runs the steps that are not done, while there is time. Returns the seconds of those that are done.

    The output of a step is in `folder`, in a file of its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noted = folder / "done.json"
    done = json.loads(noted.read_text()) if noted.exists() else {}
    end = time.monotonic() + 60 * minutes
    for step in steps:
        left = min(60 * step.minutes, end - time.monotonic())
        if step.name in done or left <= 0:
            continue
        began = time.monotonic()
        with open(folder / f"{step.name.replace(' ', '-')}.log", "ab") as log:
            try:
                status = subprocess.run(step.command, cwd=ROOT, stdout=log, stderr=log, timeout=left).returncode
            except subprocess.TimeoutExpired:
                status = "stopped by its limit"
        seconds = time.monotonic() - began
        print(f"{step.name}: {'done' if status == 0 else f'status {status}'} after {seconds:.0f} s", flush=True)
        if status == 0:
            done[step.name] = seconds
            noted.write_text(json.dumps(done, indent=1) + "\n")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        noted = FOLDER / "done.json"
        done = json.loads(noted.read_text()) if noted.exists() else {}
        for step in STEPS:
            state = "done" if step.name in done else f"up to {step.minutes:g} min"
            print(f"{step.name} ({state}): {' '.join(step.command)}")
        return
    done = run_steps(STEPS, FOLDER, args.minutes)
    left = [step.name for step in STEPS if step.name not in done]
    print("all steps are done" if not left else f"left: {', '.join(left)}; call again to go on")


if __name__ == "__main__":
    main()
