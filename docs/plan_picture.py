"""Plans README.md's example for GPUs and draws how it splits weights, as `plan.svg`: `make picture`."""

import os
import re
import tempfile
from pathlib import Path

import matplotlib as mpl

import autoshard
from autoshard.show.plots import plot_shardings, save
from autoshard.sources import load_source

HERE = Path(__file__).parent
LAYER = "model.layers.0"
DRAWN = ("model.embed_tokens", "lm_head", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.down_proj")
"""Modules whose weights are drawn."""


def main() -> None:
    """Run the example and write the picture."""
    [text] = re.findall(r"^```python\n(import torch\n.*?)^```$", (HERE.parent / "README.md").read_text(), re.M | re.S)
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "llama.py")).write_text(text)
        source = load_source(f"{file}:step")
    plan = autoshard.plan(source.model, source.inputs, optimizer=source.optimizer, mesh="2x4", device="h100")
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # matplotlib writes the date
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan", "font.family": "sans-serif"}):
        save(plot_shardings(plan, [f"{name}.weight" for name in DRAWN]), HERE / "plan.svg")


if __name__ == "__main__":
    main()
