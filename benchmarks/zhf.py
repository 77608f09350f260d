"""transformers' model types that the zoo was not made with: all that a small configuration of the general kind builds.

Whatever type an Auto class has a model for, and `zoo_hf.py` does not list, is an entry `TYPE.HEAD`; nothing is said for any
of them but what their library requires. Types that do not build so, or whose own step fails in PyTorch on a CPU, are no
entries of the coverage table (`python benchmarks/zoo_hf_held_out.py` says which build).
"""

from __future__ import annotations

from functools import partial

from transformers.models.auto import modeling_auto as auto

from benchmarks import zoo_hf
from benchmarks.zoo_hf import (
    AUDIO,
    BATCH,
    CAUSAL,
    IMAGES,
    MASKED,
    SEQ2SEQ,
    build,
    classes,
    image,
    text,
    tokens,
    waveform,
)


def question(config: object) -> dict[str, object]:
    return {"input_ids": tokens(BATCH, 16), "start_positions": classes(), "end_positions": classes()}


HEADS = {
    "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, CAUSAL, text),
    "masked": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, MASKED, text),
    "seq2seq": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, SEQ2SEQ, text),
    "images": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, IMAGES, image),
    "audio": (auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, AUDIO, waveform),
    "answers": (auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES, "AutoModelForQuestionAnswering", question),
}

_LISTED = {name.split(".")[0] for name in zoo_hf.ENTRIES}
HELD_OUT = {
    f"{kind}.{head}": partial(build, kind, auto_class, inputs)
    for head, (types, auto_class, inputs) in HEADS.items()
    for kind in types
    if kind not in _LISTED
}
zoo_hf.ENTRIES.update(HELD_OUT)
