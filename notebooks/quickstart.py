# %% [markdown]
# # Quickstart: split a training step over eight TPU chips that are not here
#
# `autoshard.plan` looks at a PyTorch program, decides how every tensor of it is split over a device mesh, and proves how
# good that decision is. No accelerator is needed and no weights are allocated.

# %%
# %matplotlib inline
import os
import warnings

warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import transformers

import autoshard
from autoshard.show import plots

SMALL = bool(os.environ.get("AUTOSHARD_NOTEBOOKS_SMALL"))  # as continuous integration runs it

# %% [markdown]
# ## A model, on the meta device

# %%
size = dict(n_layer=2, n_embd=64, n_head=4, vocab_size=512) if SMALL else {}
config = transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager", **size)
with torch.device("meta"):
    model = transformers.GPT2LMHeadModel(config)
tokens = torch.zeros(8, 64 if SMALL else 512, dtype=torch.long)
inputs = {"input_ids": tokens, "labels": tokens}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters"

# %% [markdown]
# ## The plan
#
# Per module what splits what, then what a step is predicted to take, then the proof: with a gap of 0 the cost model knows
# no better plan.

# %%
plan = autoshard.plan(model, inputs, mesh="2x4", device="tpu-v5e", optimizer=adamw)
print(plan)

# %% [markdown]
# ## How one layer is split
#
# Each drawing is a weight, cut as it is split; the numbers are the devices that hold a part.

# %%
layer = [name for name in plan.parameters if ".h.0." in name and name.endswith("weight") and ".ln_" not in name]
plots.plot_shardings(plan, sorted(layer))

# %% [markdown]
# ## Beside the plans that people write by hand

# %%
comparison = autoshard.compare(
    model, inputs, mesh="2x4", device="tpu-v5e", optimizer=adamw, plans=["dp", "fsdp", "megatron"], others={"auto": plan}
)
print(comparison)

# %%
comparison.plot()

# %% [markdown]
# ## Why this?
#
# The step planned again with one tensor fixed to each of its possible shardings, everything else free to follow. Here the
# token embedding, which is also the output layer.

# %%
why = autoshard.explain(plan, "transformer.wte.weight")
print(why)

# %% [markdown]
# ## Keep it
#
# `plan.save("plan.json")` and `autoshard.Plan.load`; `plan.to_html([why])` is one self-contained page, which
# `autoshard show plan.json --html plan.html` writes too. On the machine that has the devices, `plan.apply(model,
# optimizer)` shards the parameters and `with plan.annotate():` goes around an ordinary step.

# %%
assert autoshard.Plan.from_json(plan.to_json()) == plan
f"JSON {len(plan.to_json()) / 1e3:,.0f} kB, page {len(plan.to_html([why])) / 1e3:,.0f} kB"
