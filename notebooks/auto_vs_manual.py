# %% [markdown]
# # The automatic plan against plans written by hand
#
# Four kinds of models, few layers at real widths, one AdamW step each. Every plan is predicted by the same cost model; at
# the end one model's plans are compiled by the target's own compiler, and judged by what came out.
#
# The plans by hand: `dp` splits the batch; `fsdp` also every parameter, gathered before use; `megatron` splits linear
# layers by column and row and the vocabulary over the last axis, the batch over the others; `expert` splits experts;
# `embedding` splits rows of tables.

# %%
# %matplotlib inline
import os
import warnings

warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("PJRT_DEVICE", "CPU")

import autoshard
from autoshard.show import plots
from autoshard.show.report import search_lines
from autoshard.sources import load_source

SMALL = bool(os.environ.get("AUTOSHARD_NOTEBOOKS_SMALL"))  # as continuous integration runs it


def compared(source, mesh="2x4", **options):
    return autoshard.compare(
        source.model, source.inputs, mesh=mesh, loss_fn=source.loss_fn, optimizer=source.optimizer, **options
    )


def hf(model_type, batch=8, seq=512, **settings):
    text = {name: str(value) for name, value in settings.items()}
    if SMALL:
        batch, seq = min(batch, 8), None if seq is None else 32
    return load_source(f"hf:{model_type}", batch=batch, seq=seq, settings=text, train="adamw")


def gpt2(batch=8):
    size = dict(n_layer=1, n_embd=64, n_head=4, vocab_size=512) if SMALL else dict(n_layer=2)
    return hf("gpt2", batch, **size)


def llama(batch=8, seq=512):
    width = 64 if SMALL else 2048
    size = dict(num_hidden_layers=1 if SMALL else 2, hidden_size=width, intermediate_size=11 * width // 4)
    vocabulary = dict(vocab_size=512) if SMALL else {}
    return hf("llama", batch, seq, **size, num_attention_heads=4 if SMALL else 16, **vocabulary)


# %% [markdown]
# ## GPT-2, 2 layers, 8 TPU v5e

# %%
found = compared(gpt2(), device="tpu-v5e")
print(found)

# %%
found.plot()

# %% [markdown]
# How the first layer's weights are split, by the automatic plan and by Megatron's:

# %%
names = sorted(n for n in found["auto"].plan.parameters if ".h.0." in n and n.endswith("weight") and ".ln_" not in n)
plots.plot_shardings(found["auto"].plan, names)

# %%
plots.plot_shardings(found["megatron"].plan, names)

# %% [markdown]
# ## Llama, 2 layers 2,048 wide, 8 H100

# %%
found = compared(llama(), device="h100")
print(found)

# %%
found.plot()

# %% [markdown]
# ## A mixture of experts (GShard's layers), 8 H100

# %%
moe = load_source("../benchmarks/nets.py:moe", train="adamw", batch=8 if SMALL else None)
found = compared(moe, device="h100")
print(found)

# %%
found.plot()

# %% [markdown]
# ## A convolutional network (a ResNet of bottleneck blocks), 8 TPU v5e

# %%
resnet = hf("resnet", 32, None, depths="[1, 1, 1, 1]", hidden_sizes="[256, 512, 1024, 2048]")
if SMALL:
    resnet = hf("resnet", 8, None, depths="[1, 1]", hidden_sizes="[32, 64]", embedding_size=16)
found = compared(resnet, device="tpu-v5e")
print(found)

# %%
found.plot()

# %% [markdown]
# ## Over the batch size
#
# Llama on 8 H100. What is worth splitting changes with the batch: open marks do not fit the memory.

# %%
batches = (8, 16) if SMALL else (8, 16, 32, 64, 128)
plans = ["auto", "dp", "fsdp", "megatron"]
by_batch = {batch: compared(llama(batch), device="h100", plans=plans) for batch in batches}
plots.plot_sweep(by_batch, "sequences in a batch (of 512 tokens)")

# %% [markdown]
# ## Over 8 to 256 devices
#
# The same global batch of 256 sequences on more and more TPU v5e, half of the axes' devices each way.

# %%
meshes = {8: "2x4", 16: "4x4"} if SMALL else {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
source = llama(16 if SMALL else 256)
by_devices = {count: compared(source, mesh, device="tpu-v5e", plans=plans) for count, mesh in meshes.items()}
plots.plot_sweep(by_devices, "devices")

# %%
plots.plot_sweep(by_devices, "devices", of=lambda figures: 100 * figures.mfu, ylabel="MFU, %")

# %% [markdown]
# ## Which shape of mesh
#
# With a number of devices and no mesh, every shape of up to three axes is planned for; a shape is given up once the
# solver's bound (red) proves that no plan on it is better than the best so far. The objective is the solver's own count of
# the step, which the prediction corrects.

# %%
source = gpt2(16)
searched = autoshard.plan(
    source.model, source.inputs, devices=8 if SMALL else 16, device="tpu-v5e", optimizer=source.optimizer, time_limit=240
)
print("\n".join(search_lines(searched.search, searched.mesh.shape)))

# %%
plots.plot_search(searched)

# %% [markdown]
# ## What the compiler makes of it
#
# Predictions are one thing; here every plan of GPT-2 is compiled by XLA's own compiler for 8 H100, which need not be there,
# and the collectives, kernels and memory that came out are put under the same device model.

# %%
target = "cpu" if SMALL else "h100:8"
found = compared(gpt2(), target=target, plans=plans)
print(found)

# %%
found.plot(compiled=True)
