"""What `tests/frontends/test_eager.py` asserts on, in a process of its own with eight virtual CPU devices.

python -m tests.frontends.eager_pairs OUT.json
"""

import json
import os
import sys
import traceback

DEVICES = 8
if __name__ == "__main__":
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    faster = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ.update(XLA_FLAGS=f"{flags} {faster}".strip(), JAX_PLATFORMS="cpu", PJRT_DEVICE="CPU")

from autoshard.errors import AutoshardError  # noqa: E402
from benchmarks import eager_cases, eager_steps  # noqa: E402
from tests.conftest import FRONTENDS  # noqa: E402

MLP = "perceptron"
WRITTEN = (
    "SGD momentum", "Adam amsgrad", "Rprop foreach", "Adafactor of fixed steps", "Adafactor of relative steps",
)  # fmt: skip
MASTERS = tuple(f"masters by {way}" for way in ("copy", "foreach", "data"))
MODELS = {
    "convolutional": "SGD momentum", "recommender": "AdamW", "tied": "AdamW", "teacher": "SGD momentum",
    "copied teacher": "SGD momentum", "queue copy": "SGD", "queue all": "SGD", "queue slices": "SGD momentum",
    "copied codebook": "SGD", "statistics": "Adagrad", "experts": "masters by copy", "recurrent": "RMSprop",
    "half perceptron": "masters by foreach", "algebra": "SGD momentum",
}  # fmt: skip
"""Model -> its optimizer."""
PARTITIONED = [(MLP, "AdamW"), (MLP, "Rprop"), (MLP, "masters by foreach"), ("copied codebook", "SGD")]
"""Those whose plans are run too."""


WITHOUT = [(m, o) for m in ("statistics", "half perceptron") for o in (eager_cases.GRADIENTS, eager_cases.FORWARD)]


def pairs():
    """(Model, optimizer)."""
    of_torch = [(MLP, name) for name in eager_cases.classes()]
    return [*of_torch, *((MLP, name) for name in (*WRITTEN, *MASTERS)), *MODELS.items(), *WITHOUT]


def looked_at():
    """(Model, optimizer, front end, output); front ends take turns where the plan is run."""
    found = [(*pair, frontend, "program") for pair in pairs() for frontend in FRONTENDS]
    for number, pair in enumerate(PARTITIONED):
        frontend = FRONTENDS[number % len(FRONTENDS)]
        found += [(*pair, frontend, output) for output in ("lower", "to_jax")]
    return found


def seen(pair, programs, frontend, output):
    try:
        if frontend not in programs:
            programs[frontend] = pair.captured(frontend)
        found = eager_steps.OUTPUTS[output](pair, programs[frontend])
    except AutoshardError as error:
        return {"refused": str(error)}
    except Exception:
        return {"failed": traceback.format_exc()}
    return {"worst": found.worst, "where": found.where, "tensors": found.tensors, "untold": found.untold}


def main(out):
    found, made = {}, {}
    for model, optimizer, frontend, output in looked_at():
        if (model, optimizer) not in made:
            source = eager_cases.source(model, optimizer)
            made[model, optimizer] = eager_steps.Pair(source, eager_cases.WARM.get(optimizer, 1)), {}
        found["/".join((model, optimizer, frontend, output))] = seen(*made[model, optimizer], frontend, output)
        with open(out, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
