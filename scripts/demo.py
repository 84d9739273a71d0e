"""`make demo`: the main job in small, through the public commands, then a picture of the loss.

Records a data set from a simulated arm, computes statistics, trains a small π0.5 from scratch on the CPU, and evaluates
it closed loop against an untrained one. Everything it makes lies in demo/, assets/demo/ and checkpoints/demo/.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

OUT, RUN = Path("demo"), Path("checkpoints/demo/demo")
COMMANDS = (
    ("data", "demo", "demo/data"),
    ("data", "stats", "demo/data", "--recipe", "demo"),
    ("train", "demo", "--train.overwrite"),
    (
        "eval", str(RUN), "--sim", "planar-arm", "--compare",
        "--picture", "demo/rollouts.png", "--json", "demo/result.json",
    ),
)  # fmt: skip


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(*arguments: str) -> float:
    """Runs one piston command, its output shown; stops the demo if it fails. Returns seconds."""
    say(f"\n$ piston {' '.join(arguments)}")
    start = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "piston.cli", *arguments], check=False).returncode
    if code != 0:
        sys.exit(code)
    return time.monotonic() - start


def draw_loss(metrics: Path, picture: Path) -> None:
    """The training loss over steps, from metrics.jsonl."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    points = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True))
    axes.set(xlabel="step", ylabel="flow-matching loss", yscale="log", title="π0.5 from scratch on the planar arm")
    axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(picture, dpi=120)


def main() -> None:
    """All commands, then the loss curve and where to look."""
    seconds = [run(*command) for command in COMMANDS]
    draw_loss(RUN / "metrics.jsonl", OUT / "loss.png")
    spent = ", ".join(
        f"{c[0]} {c[1] if c[0] == 'data' else ''}".strip() + f" {s:.0f} s"
        for c, s in zip(COMMANDS, seconds, strict=True)
    )
    say(f"\n{spent}; {sum(seconds) / 60:.1f} minutes in all")
    say("look at demo/loss.png, demo/rollouts.png, demo/result.json; the policy is in checkpoints/demo/demo")


if __name__ == "__main__":
    main()
