"""What several commands share: the options that name a program, how it is loaded, and the last line under `--json`."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoshard.api import Plan
from autoshard.cli.options import pairs, parse_setting
from autoshard.cli.progress import Stages
from autoshard.frontends.choose import FRONTENDS
from autoshard.show.terminal import say
from autoshard.sources import SourceOptions, is_stablehlo

if TYPE_CHECKING:
    from autoshard.planning.options import RematOption
    from autoshard.program import Program
    from autoshard.sources import Source

_SOURCE_OPTIONS = (
    click.argument("source"),
    click.option("--batch", type=click.IntRange(1), metavar="N", help="Sample inputs: sequences in a batch (hf)."),
    click.option("--seq", type=click.IntRange(1), metavar="N", help="Sample inputs: tokens in a sequence (hf)."),
    click.option("--layers", type=click.IntRange(1), metavar="N", help="Layers of the model (hf)."),
    click.option("--dtype", metavar="bf16", help="Of parameters and inputs: f32, bf16 or f16."),
    click.option("--autocast", is_flag=True, help="The forward pass runs under autocast to bf16."),
    click.option("--checkpoint", is_flag=True, help="Layers are computed again in the backward pass (hf)."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A field of the configuration (hf)."),
)
_STEP_OPTIONS = (
    click.option(
        "--micro-batches",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="K",
        help="Forward and backward passes of a step before one update, each on --batch samples.",
    ),
    click.option(
        "--clip-grad-norm",
        type=click.FloatRange(0, min_open=True),
        metavar="NORM",
        help="The step clips gradients to this norm before the update (torch.nn.utils.clip_grad_norm_).",
    ),
)
JSON = click.option("--json", "as_json", is_flag=True, help="Last line of standard output: one JSON object.")


@dataclass(frozen=True)
class Asked:
    """What SOURCE and the options beside it name."""

    source: str
    options: SourceOptions

    def for_plan(self, plan: Plan) -> Asked:
        """With what the plan was made with in the place of what is not given."""
        known = plan.info.get("source", {})
        if known.get("source") != self.source:
            known = {}
        if not known and self.source.startswith("hf:"):
            batch, seq, train = planned_with(plan)
            known = {"batch": batch, "seq": seq, "train": train}
        known = {name: value for name, value in known.items() if name != "source"}
        return replace(self, options=SourceOptions(**known | self.options.given))


@dataclass(frozen=True)
class Step:
    """What a training step does beside the model's forward and backward pass and the update."""

    remat: RematOption
    micro_batches: int
    clip_grad_norm: float | None

    def switches(self, source: Source, device: str | None) -> tuple[str, ...]:
        """The switches that capture such a step of a model for a kind of device, all blocks treated alike."""
        from autoshard.frontends.choose import blocks_of, switches_for
        from autoshard.planning.road import remat_of_all

        remat = remat_of_all(self.remat, blocks_of(source.model) if source.train else ())
        return switches_for(device, remat, self.micro_batches, self.clip_grad_norm)

    def check_for(self, source: str) -> None:
        """Refuse options of a model's step where SOURCE is a StableHLO file."""
        options = {"remat": "as-is", "micro_batches": 1, "clip_grad_norm": None}
        for name, default in options.items():
            if is_stablehlo(source) and getattr(self, name) != default:
                option = f"--{name.replace('_', '-')}"
                raise click.ClickException(f"{source} is a whole program already: {option} is for models")


def with_step(*remat: str, help: str) -> Callable[[Any], Any]:
    """A command with the options that say what a step does, as `step`; `remat`: the words of its first one."""

    def with_options(function: Any) -> Any:
        @functools.wraps(function)
        def command(*args: Any, **rest: Any) -> Any:
            return function(*args, step=Step(*(rest.pop(each.name) for each in fields(Step))), **rest)

        words = click.option("--remat", type=click.Choice(remat), default="as-is", show_default=True, help=help)
        return functools.reduce(lambda made, option: option(made), (*reversed(_STEP_OPTIONS), words), command)

    return with_options


def with_source(train: str) -> Callable[[Any], Any]:
    """A command with the argument SOURCE and the options that say what of it is meant, as `asked`.

    Args:
        train: the help of `--train`.
    """

    def with_options(function: Any) -> Any:
        @functools.wraps(function)
        def command(*args: Any, settings: Sequence[str], **rest: Any) -> Any:
            given = {each.name: rest.pop(each.name) for each in fields(SourceOptions) if each.name != "settings"}
            os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax lowers kernels; a TPU is for one process, the training
            given["settings"] = pairs("--set", [parse_setting(setting) for setting in settings])
            return function(*args, asked=Asked(rest.pop("source"), SourceOptions(**given)), **rest)

        optimizer = click.option("--train", type=click.Choice(["adamw", "sgd"]), help=train)
        return functools.reduce(lambda made, option: option(made), (optimizer, *reversed(_SOURCE_OPTIONS)), command)

    return with_options


PLAN_FILE = click.argument("plan_file", metavar="PLAN.JSON", type=click.Path(path_type=Path))


def known_device(kind: str) -> None:
    """Refuse a device kind that there is not, before anything heavy is imported."""
    from autoshard.cost.machine.device import load_device

    load_device(kind)


def captured(asked: Asked, stages: Stages, frontend: str, switches: Sequence[str]) -> Program:
    """The program that SOURCE names; `frontend` captures it under these switches, where it is a model."""
    if is_stablehlo(asked.source):
        return module(asked, stages)
    found = loaded(asked, stages)
    stages.begin("capture")
    return traced(found, frontend, switches)


def traced(found: Source, frontend: str, switches: Sequence[str]) -> Program:
    """The program of a loaded model, captured under these switches."""
    from autoshard.frontends.choose import capture_of

    return capture_of(frontend if frontend in FRONTENDS else "auto")(
        found.model,
        found.inputs,
        loss_fn=found.loss_fn,
        optimizer=found.optimizer,
        train=found.train,
        switches=switches,
    )


def module(asked: Asked, stages: Stages) -> Program:
    """The program in the StableHLO file that SOURCE names."""
    for name in asked.options.given:
        option = "--set" if name == "settings" else f"--{name}"
        raise click.ClickException(f"{asked.source} is a whole program already: {option} is for models")
    from autoshard.frontends.stablehlo_file import read_program

    stages.begin("read")
    return read_program(asked.source)


def loaded(asked: Asked, stages: Stages) -> Source:
    """What SOURCE names: the model and its sample inputs."""
    stages.begin("import")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its hints are about training scripts
    from autoshard.frontends.switches.autocast import autocast_on
    from autoshard.sources import load_source

    stages.begin("source")
    with autocast_on():  # decorators of the file ask for CUDA before anything is captured
        return load_source(asked.source, **asked.options.given)


def planned_with(found: Plan) -> tuple[int | None, int | None, str | None]:
    """Batch, sequence length and optimizer of the program that a plan of a transformers model is for."""
    tokens = found.inputs.get("input_ids")
    batch, seq = tokens.shape[:2] if tokens is not None and len(tokens.shape) == 2 else (None, None)
    if batch is None and found.inputs:
        batch = next((tensor.shape[0] for tensor in found.inputs.values() if tensor.shape), None)
    if found.program.kind == "forward":
        return batch, seq, None
    return batch, seq, "adamw" if any(name.endswith(".exp_avg") for name in found.optimizer_state) else "sgd"


def print_json(value: dict[str, Any]) -> None:
    """The last line of standard output."""
    say(json.dumps(value, allow_nan=False).replace("\x7f", "\\u007f"))
