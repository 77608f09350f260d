"""Small configurations of transformers' model types for `coverage.py`: built with random weights, nothing downloaded.

Every type is made small in one way (`SMALL`): the fields that its configuration has of these get these values. What a
type needs beside that is said where it is listed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autoshard.sources import Source

BATCH = 8
SEQ = 16
VOCABULARY = 96
IMAGE = 32
LEARNING_RATE = 0.01

SMALL: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim"), 128),
    **dict.fromkeys(("ffn_hidden_size", "hidden_dim", "dff"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("vocab_size", "n_vocab", "n_words"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("image_size",), IMAGE),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id",), 1),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
}
"""Configuration field -> its value, in every type that has the field."""


def shrink(config: Any, **more: object) -> Any:
    """A configuration of the same type, small; in `more`, fields beside `SMALL`'s or instead of them."""
    kind = type(config)
    aliases = dict(getattr(kind, "attribute_map", {}))
    named = set(inspect.signature(kind.__init__).parameters) | {n for n in vars(config) if n[:1] != "_"}
    fields = {name: value for name, value in SMALL.items() if name in named and name not in aliases}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type") and name not in more:
            fields[name] = shrink(value).to_dict()
    for name, value in (fields | more).items():
        if isinstance(getattr(config, name, None), list) and isinstance(value, int):
            fields.pop(name, None)
    made = kind(**(fields | more))
    if getattr(made, "is_encoder_decoder", False) and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0
    if hasattr(made, "id2label"):
        made.num_labels = 8
    no_dropout(made)
    return made


def no_dropout(config: Any) -> None:
    """Set every probability of dropping something to 0, in sub-configurations too."""
    for name, value in vars(config).items():
        if ("drop" in name or name in ("mask_time_prob", "mask_feature_prob")) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            no_dropout(value)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def build(model_type: str, auto: str, inputs: Callable[..., dict[str, Any]], **more: Any) -> Source:
    """A model of this type under an Auto class (or a class of transformers), and inputs for it."""
    warnings.filterwarnings("ignore")
    import transformers

    options = {key: more.pop(key) for key in ("attn_implementation", "experts_implementation") if key in more}
    config = shrink(transformers.CONFIG_MAPPING[model_type](), **more)
    options.setdefault("experts_implementation", "batched_mm")
    torch.manual_seed(0)
    chosen = getattr(transformers, auto)
    make = chosen.from_config if auto.startswith("Auto") else chosen._from_config
    model = make(config, **options)
    for parameter in model.parameters():
        if not parameter.detach().any():  # what starts at zero would hide what is wrong behind it
            torch.nn.init.normal_(parameter, std=0.02)
    return Source(model.train(), inputs(config), None, sgd, train=True)


def tokens(*shape: int, below: int = VOCABULARY, least: int = 2) -> torch.Tensor:
    return torch.randint(least, below, shape, generator=torch.Generator().manual_seed(1))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def text(config: Any, seq: int = SEQ) -> dict[str, Any]:
    return {"input_ids": tokens(BATCH, seq), "labels": tokens(BATCH, seq)}


def masked_text(config: Any, seq: int = SEQ) -> dict[str, Any]:
    mask = torch.ones(BATCH, seq, dtype=torch.int64)
    return {"input_ids": tokens(BATCH, seq), "attention_mask": mask, "labels": tokens(BATCH, seq)}


def image(config: Any, size: int | None = None) -> dict[str, Any]:
    side = size or getattr(config, "image_size", IMAGE)
    side = side[0] if isinstance(side, list | tuple) else side
    return {"pixel_values": floats(BATCH, getattr(config, "num_channels", 3), side, side), "labels": classes()}


def classes() -> torch.Tensor:
    return tokens(BATCH, below=8, least=0)


def waveform(config: Any, samples: int = 1600) -> dict[str, Any]:
    return {"input_values": floats(BATCH, samples), "labels": classes()}


def sound_and_text(config: Any) -> dict[str, Any]:
    return {"input_features": floats(BATCH, config.num_mel_bins, 64), "labels": tokens(BATCH, SEQ)}


def image_and_text(config: Any, seq: int = SEQ) -> dict[str, Any]:
    side = config.vision_config.image_size
    return {
        "input_ids": tokens(BATCH, seq),
        "attention_mask": torch.ones(BATCH, seq, dtype=torch.int64),
        "pixel_values": floats(BATCH, 3, side, side),
        "return_loss": True,
    }


CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
SEQ2SEQ, IMAGES = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"
AUDIO = "AutoModelForAudioClassification"

WAV = {
    "conv_dim": [32, 32, 32],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "num_feat_extract_layers": 3,
}

_TEXT: dict[str, dict[str, Any]] = {
    # dense causal language models
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 64},
    "bloom": {},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "phi": {},
    "phi3": {},
    "falcon": {},
    "mpt": {},
    "codegen": {"rotary_dim": 8},
    "stablelm": {},
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "cohere2": {},
    "starcoder2": {},
    "biogpt": {},
    "xglm": {},
    "ctrl": {},
    "persimmon": {},
    "nemotron": {},
    "smollm3": {},
    "glm": {},
    "glm4": {},
    "helium": {},
    "exaone4": {},
    "modernbert-decoder": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "diffllama": {},
    "bitnet": {},
    "arcee": {},
    "seed_oss": {},
    "ernie4_5": {},
    "apertus": {},
    # mixtures of experts
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "gpt_oss": {"sliding_window": 8},
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "phimoe": {},
    "jetmoe": {"kv_channels": 16},
    "dbrx": {},
    # state-space and recurrent
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "falcon_mamba": {"state_size": 8},
    "rwkv": {"context_length": 32, "attention_hidden_size": 64},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 8, "num_hidden_layers": 3},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "lfm2": {},
    "xlstm": {},
}
_MASKED: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "electra": {},
    "deberta": {},
    "deberta-v2": {},
    "albert": {"embedding_size": 32},
    "distilbert": {},
    "mpnet": {},
    "xlm": {},
    "xlm-roberta": {},
    "camembert": {},
    "convbert": {},
    "fnet": {},
    "roformer": {},
    "squeezebert": {},
    "megatron-bert": {},
    "nystromformer": {"segment_means_seq_len": 16, "num_landmarks": 4},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 32},
    "big_bird": {},
    "longformer": {"attention_window": 8},
    "esm": {"token_dropout": False, "position_embedding_type": "rotary"},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "ibert": {},
    "yoso": {},
    "eurobert": {},
    "nomic_bert": {},
}
_SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {},
    "bart": {},
    "pegasus": {},
    "mbart": {},
    "marian": {},
    "m2m_100": {},
    "blenderbot": {},
    "longt5": {},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "prophetnet": {"num_encoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "switch_transformers": {},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "umt5": {},
    "mt5": {},
    "plbart": {},
    "nllb-moe": {},
}
_IMAGES: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {},
    "beit": {},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
    "convnext": {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "patch_size": 2},
    "convnextv2": {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "patch_size": 2},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
    "regnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "groups_width": 16},
    "segformer": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "num_attention_heads": [1, 2],
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 32,
    },
    "dinov2": {},
    "mobilevit": {
        "hidden_sizes": [24, 32, 40],
        "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 64],
        "patch_size": 2,
        "image_size": 64,
    },
    "mobilenet_v1": {"depth_multiplier": 0.25, "image_size": 64},
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 64},
    "poolformer": {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    "levit": {"image_size": 64, "num_attention_heads": [2, 2, 2], "hidden_sizes": [32, 48, 64], "depths": [1, 1, 1]},
    "pvt": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4},
    "hiera": {},
    "vit_msn": {},
    "data2vec-vision": {},
    "bit": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8},
    "imagegpt": {},
    "ijepa": {},
    "dinov2_with_registers": {},
    "swiftformer": {},
}

CLIP = {
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "eos_token_id": 1,
    },
    "projection_dim": 32,
}

ENTRIES: dict[str, Callable[[], Source]] = {
    **{name: partial(build, name, CAUSAL, text, **more) for name, more in _TEXT.items()},
    **{name: partial(build, name, MASKED, masked_text, **more) for name, more in _MASKED.items()},
    **{name: partial(build, name, SEQ2SEQ, text, **more) for name, more in _SEQ2SEQ.items()},
    **{name: partial(build, name, IMAGES, image, **more) for name, more in _IMAGES.items()},
    "segformer-segmentation": partial(
        build,
        "segformer",
        "AutoModelForSemanticSegmentation",
        lambda c: {"pixel_values": floats(BATCH, 3, 32, 32), "labels": tokens(BATCH, 32, 32, below=8, least=0)},
        **_IMAGES["segformer"],
    ),
    "wav2vec2": partial(build, "wav2vec2", AUDIO, waveform, **WAV),
    "hubert": partial(build, "hubert", AUDIO, waveform, **WAV),
    "wavlm": partial(build, "wavlm", AUDIO, waveform, **WAV, num_buckets=16, max_bucket_distance=32),
    "sew": partial(build, "sew", AUDIO, waveform, **WAV, squeeze_factor=2),
    "audio-spectrogram-transformer": partial(
        build,
        "audio-spectrogram-transformer",
        AUDIO,
        lambda c: {"input_values": floats(BATCH, 32, 32), "labels": classes()},
        max_length=32,
        num_mel_bins=32,
        frequency_stride=8,
        time_stride=8,
    ),
    "whisper": partial(
        build,
        "whisper",
        "WhisperForConditionalGeneration",
        sound_and_text,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=64,
    ),
    "speech_to_text": partial(
        build,
        "speech_to_text",
        "AutoModelForSpeechSeq2Seq",
        lambda c: {"input_features": floats(BATCH, 32, 16), "labels": tokens(BATCH, SEQ)},
        input_feat_per_channel=16,
        conv_channels=32,
        max_source_positions=64,
        max_target_positions=64,
    ),
    "clip": partial(build, "clip", "CLIPModel", image_and_text, **CLIP),
    "siglip": partial(
        build, "siglip", "SiglipModel", image_and_text, **{k: v for k, v in CLIP.items() if k != "projection_dim"}
    ),
    "blip": partial(
        build,
        "blip",
        "BlipForConditionalGeneration",
        lambda c: {"pixel_values": floats(BATCH, 3, 32, 32), **text(c)},
        **CLIP,
    ),
    "vilt": partial(
        build,
        "vilt",
        "ViltForQuestionAnswering",
        lambda c: {
            "input_ids": tokens(BATCH, SEQ),
            "attention_mask": torch.ones(BATCH, SEQ, dtype=torch.int64),
            "pixel_values": floats(BATCH, 3, 32, 32),
            "pixel_mask": torch.ones(BATCH, 32, 32, dtype=torch.int64),
            "labels": torch.rand(BATCH, 8, generator=torch.Generator().manual_seed(3)),
        },
        max_image_length=-1,
    ),
    "clipseg": partial(build, "clipseg", "CLIPSegModel", image_and_text, **CLIP),
    "altclip": partial(build, "altclip", "AltCLIPModel", image_and_text),
    "git": partial(build, "git", CAUSAL, lambda c: {**text(c), "pixel_values": floats(BATCH, 3, 32, 32)}),
    "llava": partial(
        build,
        "llava",
        "LlavaForConditionalGeneration",
        lambda c: {
            "input_ids": torch.cat([torch.full((BATCH, 16), 90), tokens(BATCH, SEQ, below=90)], 1),
            "pixel_values": floats(BATCH, 3, 32, 32),
            "labels": tokens(BATCH, 32, below=90),
        },
        image_token_index=90,
        vision_feature_layer=-1,
    ),
    "dpt": partial(
        build,
        "dpt",
        "AutoModelForSemanticSegmentation",
        lambda c: {"pixel_values": floats(BATCH, 3, 32, 32), "labels": tokens(BATCH, 32, 32, below=8, least=0)},
        neck_hidden_sizes=[8, 16, 32, 32],
        backbone_out_indices=[0, 0, 1, 1],
        fusion_hidden_size=32,
    ),
    "patchtst": partial(
        build,
        "patchtst",
        "PatchTSTForPrediction",
        lambda c: {"past_values": floats(BATCH, 32, 4), "future_values": floats(BATCH, 8, 4)},
        context_length=32,
        prediction_length=8,
        num_input_channels=4,
        patch_length=8,
        patch_stride=8,
    ),
    "timesformer": partial(
        build,
        "timesformer",
        "AutoModelForVideoClassification",
        lambda c: {"pixel_values": floats(BATCH, 4, 3, 32, 32), "labels": classes()},
        num_frames=4,
    ),
    "decision_transformer": partial(
        build,
        "decision_transformer",
        "DecisionTransformerModel",
        lambda c: {
            "states": floats(BATCH, SEQ, 8),
            "actions": floats(BATCH, SEQ, 4),
            "rewards": floats(BATCH, SEQ, 1),
            "returns_to_go": floats(BATCH, SEQ, 1),
            "timesteps": tokens(BATCH, SEQ, below=32),
        },
        state_dim=8,
        act_dim=4,
        max_ep_len=64,
    ),
}
"""Name -> the training step; the name is the model type unless a type has several entries."""
