"""The trainings of the bundled weights, one after the other: `python -m training.bundled --texts FOLDER --work FOLDER`.

Each is one `evictbench train` command, which goes on where it was stopped; its files are copied to
`policies/<policy>/weights/`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from evictbench.models import bundled

POLICIES = Path(__file__).parent.parent / "policies"

SHIPPED = ("weights.safetensors", "config.json", "README.md", "curves.jsonl", "curves.png")
"""The files of a training that are shipped."""


@dataclass(frozen=True)
class Run:
    """One training.

    policy: as on the command line. texts: the name of a set of `training.texts`. package: the policy's package, whose
    folder `weights/` the files are copied to. folder: its name there; None for a training that only another starts
    from. options: of `evictbench train`; `{work}` stands for the folder of all trainings. name: the folder of this one,
    if not the policy's.
    """

    policy: str
    texts: str
    package: str
    folder: str | None
    options: str
    name: str | None = None


SCORER = "--window 64 --budget 128,160,192,256 --lr 3e-3"
MLP = f"{SCORER} --steps 1000 --recipe hidden=64,recent="
MLSTM = f"{SCORER} --steps 500 --recipe hidden=24,recent="
READING, RETRIEVING = 0.75, 0.25
"""The share of a small cache that is kept for recent entries, in training as in use: reading on needs most of it,
retrieving little. Under these budgets a quarter is never more than the window. The weights that are shipped for reading
on are of before the share was trained with: they count from the window, and their cards have no `protected`."""
GATE = "--window 32 --steps 120 --lr 1.5e-4 --recipe ratio=12,ramp=0.6 --save-every 10"
INDEXMEM = "--window 32 --steps 200 --lr 2e-3 --recipe beta=32,width=128,centroids=16 --save-every 10"
RANKER = (
    "--length 512 --budget 64,128,256 --steps 2000 --lr 3e-3 --recipe method=supervised,target=set,horizon=16,every=4"
)
REINFORCED = (
    "--length 512 --budget 64,128,256 --steps 240 --lr 3e-4 --save-every 20 "
    "--recipe method=reinforce,horizon=32,start={work}/distillcache-supervised"
)

RUNS = (
    Run("kvpop_mlp:label=mean", "scorers", "kvpop", "smollm2-mlp-mean", f"{MLP}{READING}"),
    Run("kvpop_mlp:label=max", "scorers", "kvpop", "smollm2-mlp-max", f"{MLP}{RETRIEVING}"),
    Run("kvpop:label=mean", "scorers", "kvpop", "smollm2-mlstm-mean", f"{MLSTM}{READING}"),
    Run("kvpop:label=max", "scorers", "kvpop", "smollm2-mlstm-max", f"{MLSTM}{RETRIEVING}"),
    Run("dms", "gates", "dms", "smollm2", GATE),
    Run("indexmem_pp", "gates", "indexmem_pp", "smollm2", INDEXMEM),
    Run("distillcache", "rankers", "distillcache", None, RANKER, name="distillcache-supervised"),
    Run("distillcache", "rankers", "distillcache", "smollm2", REINFORCED),
)

COMMON = "--no-pack --length 1024 --held-out 8 --dtype float32 --weights-dtype float16"


def main() -> None:
    """Train the policy of --only, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=Path, required=True, help="the folder that training.texts has written")
    parser.add_argument("--work", type=Path, required=True, help="a folder for checkpoints and features (11 GB)")
    parser.add_argument("--only", help="train only the policy of this name, settings included")
    arguments = parser.parse_args()
    for run in RUNS:
        if arguments.only in (None, run.policy):
            train(run, arguments.texts, arguments.work)


def train(run: Run, texts: Path, work: Path) -> None:
    """Do one training, and copy the files that are shipped."""
    out = work / (run.name or run.policy.replace(":", "-"))
    command = [
        *(sys.executable, "-m", "evictbench", "train", "--policy", run.policy, "--model", bundled.NAME),
        *("--data", str(texts / f"{run.texts}.jsonl"), "--out", str(out), "--store", str(work / "features")),
        *shlex.split(f"{COMMON} {run.options}".replace("{work}", shlex.quote(str(work)))),
    ]
    print(shlex.join(command[1:]), flush=True)
    subprocess.run(command, check=True)
    if run.folder is None:
        return
    shipped = POLICIES / run.package / "weights" / run.folder
    shipped.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(out / name, shipped / name)


if __name__ == "__main__":
    main()
