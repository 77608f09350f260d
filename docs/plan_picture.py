"""Plans README.md's example for GPUs and draws how it splits weights, as `plan.svg`: `make picture`."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

import autoshard
from autoshard.show.plots import plot_shardings, save

HERE = Path(__file__).parent
LAYER = "model.layers.0"
DRAWN = ("model.embed_tokens", "lm_head", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.down_proj")
"""Modules whose weights are drawn."""


def main() -> None:
    """Run the example and write the picture."""
    readme = (HERE.parent / "README.md").read_text().replace("\\\n", "")
    [command] = re.findall(r"^\$ autoshard (plan .*) -o llama\.json", readme, re.M)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "llama.json")
        subprocess.run([sys.executable, "-m", "autoshard", *shlex.split(command), "-o", file], check=True)
        plan = autoshard.Plan.load(file)
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # matplotlib writes the date
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan", "font.family": "sans-serif"}):
        save(plot_shardings(plan, [f"{name}.weight" for name in DRAWN]), HERE / "plan.svg")


if __name__ == "__main__":
    main()
