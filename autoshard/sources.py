"""Resolves programs named on the command line: `hf:gpt2`, or `file.py:function`."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from autoshard.dtypes import NO_FP8
from autoshard.errors import SourceError

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""Names of `dtype` -> torch's."""

DEFAULT_BATCH = 8
DEFAULT_SEQ = 512
LEARNING_RATE = 1e-3
SGD_MOMENTUM = 0.9


STABLEHLO_SUFFIXES = (".mlir", ".mlirbc", ".stablehlo", ".bytecode", ".bc", ".jax_export")
"""File name suffixes of StableHLO sources."""


def is_stablehlo(source: str) -> bool:
    """Whether a SOURCE names a StableHLO file, or a directory of torch_xla's `save_as_stablehlo`."""
    path = Path(source)
    return path.suffix in STABLEHLO_SUFFIXES or (path / "functions").is_dir()


@dataclass(frozen=True)
class Source:
    """A program to plan: the first arguments of `capture`.

    Attributes:
        origin: arguments of the `load_source` call that made it, to repeat it in another process.
    """

    model: Any
    inputs: Any
    loss_fn: Callable[..., Any] | None = None
    optimizer: Any = None
    train: bool = False
    origin: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SourceOptions:
    """What of a source is meant.

    Attributes:
        batch: sequences (or images) per step, 8 if not given.
        seq: tokens per sequence; 512, or as many as the model has positions for, if not given.
        settings: configuration fields -> values as text (`n_layer` -> `"2"`).
        train: `"adamw"` or `"sgd"` (momentum 0.9): a training step with this optimizer; None: forward only.
        layers: layers of the model (`hf:`); of a function, its parameter `layers`.
        dtype: `f32`, `bf16` or `f16`: of the parameters, and of inputs that are not whole numbers.
        autocast: whether the forward pass runs under `torch.autocast` to bf16.
        checkpoint: whether layers are computed again in the backward pass (`gradient_checkpointing_enable`).

    Raises:
        SourceError: an unknown optimizer or dtype, or a size below 1.
    """

    batch: int | None = None
    seq: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    train: str | None = None
    layers: int | None = None
    dtype: str | None = None
    autocast: bool = False
    checkpoint: bool = False

    def __post_init__(self) -> None:
        """Check them."""
        if self.train not in (None, "adamw", "sgd"):
            raise SourceError(f"unknown optimizer {self.train!r}; a step can be captured with adamw or sgd")
        for name in ("batch", "seq", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SourceError(f"{name} must be at least 1, not {value}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise SourceError(f"dtype is {', '.join(DTYPES)}, not {self.dtype!r}{_of_8_bits(self.dtype)}")

    @property
    def given(self) -> dict[str, Any]:
        """Those that say something, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}


def load_source(source: str, **given: Any) -> Source:
    """Build the model that `source` names, and inputs for it.

    Args:
        source: `hf:TYPE`, a transformers model type in its default configuration, or `hf:PATH/config.json`, on meta,
            with `sdpa` attention (`eager` where a model has none), batched experts (`batched_mm`), and in training
            dropout 0, where settings say nothing else; or `FILE.py:FUNCTION`, where the function returns a model,
            `(model, sample_inputs)`, or a dict with `model`, `inputs` and optionally `loss_fn` and `optimizer`, and is
            called with those of `batch`, `seq`, `layers` and the settings that it has parameters for.
        given: the fields of `SourceOptions`.

    Raises:
        SourceError: an unknown model type, configuration field, file or function.
    """
    options = SourceOptions(**given)
    origin = {"source": source, **options.given}
    kind, _, rest = source.partition(":")
    path, _, function = source.rpartition(":")
    if kind == "hf" and rest:
        found = _transformers(rest, options)
    elif path.endswith(".py") and function:
        found = _file(Path(path), function, options)
    else:
        found = None
    if found is not None:
        return replace(_as_run(found, source, options), origin=origin)
    raise SourceError(
        f"{source!r} names no program; write hf:MODEL_TYPE (such as hf:gpt2), FILE.py:FUNCTION, "
        f"or a StableHLO file ({', '.join(STABLEHLO_SUFFIXES)}){_meant(source)}"
    )


def _of_8_bits(dtype: str) -> str:
    """Why there is no plan in floats of 8 bits, if `dtype` is one."""
    if not any(part in dtype.lower() for part in ("fp8", "f8", "float8")):
        return ""
    return f": {NO_FP8}"


def _as_run(found: Source, source: str, options: SourceOptions) -> Source:
    """The program in another precision, or with its layers recomputed."""
    import torch

    model, inputs = found.model, found.inputs
    wanted = getattr(torch, DTYPES[options.dtype]) if options.dtype is not None else None
    if source.startswith("hf:"):
        wanted = wanted or model.dtype  # a config.json may say bf16
    if wanted is not None:
        inputs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda each: each.to(wanted) if each.is_floating_point() else each, inputs
        )
        if not source.startswith("hf:"):
            model = model.to(wanted)
    if options.autocast:  # in a class, so that a model built anew from its configuration has it too
        kind = type(model)
        forward = torch.autocast("xla", dtype=torch.bfloat16)(kind.forward)
        model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    if options.checkpoint and not turn_checkpoints_on(model):
        raise SourceError(f"{source} has no checkpoints to turn on: write torch.utils.checkpoint around its layers")
    return replace(found, inputs=inputs)


def turn_checkpoints_on(model: Any) -> bool:
    """Have a transformers model compute its layers again in the backward pass; False where it cannot."""
    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        return False
    enable({"use_reentrant": False})
    return True


def _meant(source: str) -> str:
    """`; did you mean …?` for a Python file without a function, and a model type without `hf:`; or nothing."""
    if source.endswith(".py"):
        try:
            body = ast.parse(Path(source).read_text(encoding="utf-8")).body
        except (OSError, ValueError, SyntaxError):
            return ""
        named = [f"{source}:{each.name}" for each in body if isinstance(each, ast.FunctionDef)]
    else:
        try:
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        except ImportError:
            return ""
        named = [f"hf:{source}"] if source in CONFIG_MAPPING_NAMES else []
    return f"; did you mean {', '.join(named[:3])}?" if named else ""


def _optimizer(name: str) -> Callable[[Iterable[Any]], Any]:
    import torch

    if name == "adamw":
        return lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    return lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=SGD_MOMENTUM)


def _close(name: str, names: Iterable[str]) -> str:
    """`; did you mean a, b?`, or nothing."""
    matches = difflib.get_close_matches(name.lower(), list(names), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(matches)}?" if matches else ""


# transformers


LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Fields of a configuration that count layers; encoders and decoders may have one each."""


def _transformers(name: str, options: SourceOptions) -> Source:
    try:
        import torch
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    except ImportError as error:
        raise SourceError(
            f"hf:{name} needs transformers, which could not be imported ({error}): "
            "pip install 'autoshard[hf]' brings it"
        ) from error
    model_type, written = _config_file(Path(name)) if name.endswith(".json") else (name, {})
    if model_type not in CONFIG_MAPPING_NAMES:
        raise SourceError(f"transformers has no model type {model_type!r}{_close(model_type, CONFIG_MAPPING_NAMES)}")
    settings, train = dict(options.settings), options.train
    attention = settings.pop("attn_implementation", None)
    experts = settings.pop("experts_implementation", "batched_mm")
    kind = CONFIG_MAPPING[model_type]
    if options.layers is not None:
        counted = [field for field in LAYERS if isinstance(getattr(kind(), field, None), int)]
        if not counted:
            raise SourceError(f"hf:{model_type} does not count its layers by one number; --set its own fields")
        settings = dict.fromkeys(counted, str(options.layers)) | settings
        full = written.get("num_hidden_layers")  # a list of as many has an entry for each layer, such as layer_types
        written = {
            name: value[: options.layers] if isinstance(value, list) and len(value) == full else value
            for name, value in written.items()
        } | {name: options.layers for name in counted if name in written}
    config = _configured(kind, model_type, settings, written)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # as T5's checkpoints have it
    auto = _auto_class(model_type, config)
    inputs = _inputs(model_type, auto.__name__, config, options.batch or DEFAULT_BATCH, options.seq, train is not None)
    try:
        given = {"dtype": getattr(torch, DTYPES[options.dtype])} if options.dtype else {}
        given["experts_implementation"] = experts
        with torch.device("meta"):
            try:
                model = auto.from_config(config, attn_implementation=attention or "sdpa", **given)
            except ValueError:  # a model without it
                if attention is not None:
                    raise
                model = auto.from_config(config, attn_implementation="eager", **given)
    except Exception as error:
        raise SourceError(f"transformers cannot build {model_type} from this configuration: {_said(error)}") from error
    model.train(train is not None)
    return Source(model, inputs, None, _optimizer(train) if train else None, train is not None)


def _config_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Model type and fields of a `config.json`."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise SourceError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise SourceError(f"{path} has no field model_type: a transformers config.json is needed")
    return fields.pop("model_type"), fields


def _auto_class(model_type: str, config: Any) -> Any:
    """The Auto class of the task that a model type is for."""
    from transformers.models.auto import modeling_auto as auto

    seq2seq = ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
    masked = ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES")
    causal = ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    image = ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES")
    speech = ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
    first = [seq2seq] if getattr(config, "is_encoder_decoder", False) else []
    if first and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        first.insert(0, speech)
    decoder = getattr(config, "is_decoder", False)
    for name, mapping in (*first, *([causal, masked] if decoder else [masked, causal]), seq2seq, image):
        if model_type in getattr(auto, mapping):
            return getattr(auto, name)
    raise SourceError(
        f"hf:{model_type} is none of causal, masked or sequence-to-sequence language model or image classifier; "
        "write a FILE.py:FUNCTION that returns the model and its inputs"
    )


def _inputs(model_type: str, task: str, config: Any, batch: int, seq: int | None, train: bool) -> dict[str, Any]:
    import torch

    def tokens(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    if task == "AutoModelForImageClassification":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        inputs = {"pixel_values": torch.empty(batch, channels, height, width, device="meta")}
        return inputs | ({"labels": tokens(batch)} if train else {})
    if task == "AutoModelForSpeechSeq2Seq":  # whose encoder halves the frames
        features = torch.empty(batch, config.num_mel_bins, 2 * config.max_source_positions, device="meta")
        spoken = tokens(batch, min(seq or DEFAULT_SEQ, config.max_target_positions))
        return {"input_features": features, ("labels" if train else "decoder_input_ids"): spoken}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        if seq is not None and seq > positions:
            raise SourceError(
                f"hf:{model_type} has {positions} positions, fewer than --seq {seq}; with as many: "
                f"--set max_position_embeddings={seq}"
            )
        offset = 2 if model_type in ("roberta", "xlm-roberta", "camembert") else 0  # positions start after padding
        seq = seq or min(DEFAULT_SEQ, positions - offset)
    seq = seq or DEFAULT_SEQ
    inputs = {"input_ids": tokens(batch, seq)}
    if getattr(config, "is_encoder_decoder", False) and not train:
        inputs["decoder_input_ids"] = tokens(batch, seq)
    return inputs | ({"labels": tokens(batch, seq)} if train else {})


def _configured(kind: Any, model_type: str, settings: Mapping[str, str], written: Mapping[str, Any]) -> Any:
    """The configuration that is `written`, else the default, with these settings; what a type derives from a field
    follows it (Llama's head_dim)."""
    try:
        config = kind(**written)
    except Exception as error:
        raise SourceError(f"transformers cannot read this configuration of {model_type}: {_said(error)}") from error
    for name, text in settings.items():
        _set(config, model_type, name, text)
    direct = {name: getattr(config, name) for name in settings if "." not in name}
    try:
        config = kind(**{**written, **direct})
    except Exception as error:
        raise SourceError(f"{model_type}'s configuration refuses these fields: {_first_line(error)}") from error
    _no_dropout(config)
    for name, text in settings.items():
        _set(config, model_type, name, text)
    return config


def _no_dropout(config: Any) -> None:
    """Set every dropout probability to 0, in sub-configurations too."""
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _no_dropout(value)


def _set(config: Any, model_type: str, name: str, text: str) -> None:
    """Set one field (`a.b`: of the sub-configuration `a`), keeping its type."""
    *path, field = name.split(".")
    for part in path:
        config = getattr(config, part, None)
    aliases = dict(getattr(config, "attribute_map", {}))
    known = ({n for n in vars(config) if not n.startswith("_")} | set(aliases)) if config is not None else set()
    if field not in known and not _is_optional(config, field):
        raise SourceError(f"{model_type}'s configuration has no field {name!r}{_close(field, known)}")
    old = getattr(config, field, None)
    try:
        value = _typed(text, old)
    except ValueError:
        kind = type(old).__name__
        raise SourceError(f"{model_type}'s {name} is of type {kind} (default {old!r}), not {text!r}") from None
    try:
        setattr(config, field, value)
    except Exception as error:
        raise SourceError(f"{model_type}'s {name} cannot be {text!r}: {_first_line(error)}") from error


def _is_optional(config: Any, field: str) -> bool:
    """Whether the model asks its configuration for a field that need not be there (Qwen3 MoE's `head_dim`)."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        found = importlib.util.find_spec(module)
        text = Path(found.origin or "").read_text() if found is not None else ""
    except (ImportError, OSError, ValueError):
        return False
    return f'getattr(config, "{field}", ' in text


def _typed(text: str, old: Any) -> Any:
    """`text` parsed as the type of `old`; where that is None, as JSON, else as text."""
    if isinstance(old, bool):
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(text)
        return text.lower() in ("true", "1")
    if text.lower() in ("none", "null"):
        return None
    if isinstance(old, int | float) or old is None:
        try:
            number = json.loads(text)
        except json.JSONDecodeError:
            if old is None:
                return text
            raise ValueError(text) from None
        if old is None:
            return number
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(text)
        if isinstance(old, int) and (isinstance(number, float) and not number.is_integer()):
            raise ValueError(text)
        return int(number) if isinstance(old, int) else float(number)
    if isinstance(old, str):
        return text
    value = json.loads(text)
    if isinstance(old, list | tuple | dict) and not isinstance(value, list | dict):
        raise ValueError(text)
    return value


# file.py:function


class _AsWritten(SourceFileLoader):
    """Compiles the file from source: stale bytecode may pass as fresh within a second at equal size."""

    def get_code(self, fullname: str) -> CodeType:
        """The file's code."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _file(path: Path, function: str, options: SourceOptions) -> Source:
    if not path.is_file():
        raise SourceError(f"there is no file {path}")
    loader = _AsWritten(path.stem, str(path))
    spec = ModuleSpec(path.stem, loader, origin=str(path))
    spec.has_location = True  # the module knows its file
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise SourceError(f"{path} cannot be imported: {_said(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    build = getattr(module, function, None)
    if not callable(build):
        names = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise SourceError(f"{path} has no function {function!r}{_close(function, names)}")
    arguments: dict[str, Any] = {name: _literal(text) for name, text in options.settings.items()}
    parameters = inspect.signature(build).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    sizes = {"batch": options.batch, "seq": options.seq, "layers": options.layers}
    arguments |= {name: value for name, value in sizes.items() if value is not None}
    unknown = [] if anything else [name for name in arguments if name not in parameters]
    if unknown:
        raise SourceError(f"{path}:{function} has no parameter {unknown[0]!r}{_close(unknown[0], parameters)}")
    try:
        made = build(**arguments)
    except (Exception, SystemExit) as error:
        raise SourceError(f"{path}:{function} failed: {_said(error)}") from error
    return _returned(made, f"{path}:{function}", options.train)


def _returned(made: Any, where: str, train: str | None) -> Source:
    import torch

    if isinstance(made, torch.nn.Module):
        made = {"model": made}
    elif isinstance(made, tuple) and len(made) == 2:
        made = {"model": made[0], "inputs": made[1]}
    must = f"{where} must return a torch.nn.Module, (model, sample_inputs), or a dict with 'model' and 'inputs'"
    if not isinstance(made, Mapping):
        raise SourceError(f"{must}, not {type(made).__name__}")
    if not isinstance(made.get("model"), torch.nn.Module):
        raise SourceError(f"{must}; its model is a {type(made.get('model')).__name__}")
    allowed = ("model", "inputs", "loss_fn", "optimizer")
    unknown = [key for key in made if key not in allowed]
    if unknown:
        raise SourceError(f"{where} returned a dict with {unknown[0]!r}; it may have {', '.join(allowed)}")
    if made.get("inputs") is None:
        raise SourceError(f"{where} returned no sample inputs; return (model, sample_inputs)")
    optimizer = made.get("optimizer") or (_optimizer(train) if train else None)
    loss_fn = made.get("loss_fn")
    trains = optimizer is not None or loss_fn is not None
    return Source(made["model"], made["inputs"], loss_fn, optimizer, trains)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _said(error: BaseException) -> str:
    """`KeyError: 'x'`, or of a message in several lines the first."""
    if isinstance(error, SystemExit):
        return f"it ended the process (SystemExit: {error.code}); keep what a script does under __name__ == '__main__'"
    first = _first_line(error)
    return first if first == type(error).__name__ else f"{type(error).__name__}: {first}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
