"""Runs every example with sizes for a laptop, one after the other; for a nightly job: make examples.

Each must end well and print what it promises. Outputs go to a temporary folder.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# (program and flags, what it must print)
RUNS = (
    ("single_device.py", "gradients"),
    ("custom_mask.py", "picture"),
    ("train_lm.py --steps 10 --seq-len 1024", "compiled 1 time(s) for 10 batches"),
    ("hybrid_layers.py --seq-len 1024 --steps 6", "step 6/6"),
    ("hybrid_layers.py --seq-len 1024 --steps 4 --pattern wwf --dp 2 --cp 4", "step 4/4"),
    ("video.py --seq-len 1024 --steps 10", "of a standing picture"),
    (
        "video.py --seq-len 1024 --steps 4 --clip bigbuckbunny.mp4 --dp 2 --cp 4 --window 2 --sink-frames 1",
        "step 4/4",
    ),
    ("preference.py --seq-len 1024 --steps 10", "gained more than the other"),
    ("grain_pipeline.py --seq-len 1024 --steps 4 --workers 1", "same next batch: True"),
    ("profile_overlap.py --seq-len 2048", "of it hidden"),
    ("multi_host.py --seq-len 512 --steps 4 --save-every 2 --checkpoints c", "step 4"),
    (
        "multi_host.py --seq-len 512 --steps 6 --checkpoints c --dp 2 --cp 2",
        "resuming after step 4",
    ),
)


def main() -> None:
    """Runs those whose name contains the argument, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="part of the program's name")
    args = parser.parse_args()
    unset = ("XLA_FLAGS", "PJRT_NPROC")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for line, promised in RUNS:
            if args.only not in line:
                continue
            program, *flags = line.split()
            command = [sys.executable, str(ROOT / "examples" / program), *flags]
            start = time.monotonic()
            result = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            good = result.returncode == 0 and promised in result.stdout
            print(
                f"{'ok' if good else 'FAILED':<7}{time.monotonic() - start:5.0f} s  {line}",
                flush=True,
            )
            if not good:
                failed.append(line)
                print(result.stdout[-2000:], result.stderr[-4000:], sep="\n", flush=True)
    if failed:
        sys.exit(f"error: {len(failed)} of the examples failed: {failed}")


if __name__ == "__main__":
    main()
