"""Tiny random Qwen2-VL and Qwen3-VL of transformers: what they are given and give.

The towers see real pictures through the real image processor. Weights have a standard
deviation of 0.3 with random biases and norms: at the default of 0.02 attention is so
flat that wrong positions move logits by 1e-3 only.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
image: Any = pytest.importorskip("PIL.Image")

WORDS = 300  # ids below are text
IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END, VOCABULARY = 300, 301, 302, 303, 304
MERGE = 2
ANSWER = 8  # tokens decoded after the prompt
# Frequencies of t, h and w. They differ, or swapping axes could go unseen.
SECTIONS = {"qwen2_vl": (3, 8, 5), "qwen3_vl": (7, 5, 4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Ids with two pictures and a video, and the processor's arrays.

    Args:
      ids, types: of the tokens [N]; types 0 text, 1 image, 2 video.
      answer: ids of the text that is then decoded [ANSWER].
      pixels: of "image" and "video": rows of patches.
      grids: of "image" and "video": [media, 3], T, H, W in patches.
    """

    ids: np.ndarray
    types: np.ndarray
    answer: np.ndarray
    pixels: dict[str, np.ndarray]
    grids: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers' decoder was given, and what it made of it.

    Args:
      family: a key of SECTIONS.
      config: config.json of the model.
      weights: of the whole model, by the names of transformers.
      prompt: that it was given.
      positions: that its rotary embedding saw, prompt and answer [3, N + ANSWER].
      embeddings: of prompt and answer, media in place [N + ANSWER, D].
      deepstack: added after the first layers [layers, N + ANSWER, D].
      logits: of prompt and answer [N + ANSWER, V].
    """

    family: str
    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    prompt: Prompt
    positions: np.ndarray
    embeddings: np.ndarray
    deepstack: np.ndarray
    logits: np.ndarray


def make_reference(family: str) -> Reference:
    """Builds the model, gives it a prompt, decodes an answer token by token."""
    model = make_model(family)
    prompt = make_prompt(family, model.config.vision_config.patch_size)
    seen, logits = _run(model, prompt)
    return Reference(
        family=family,
        config=model.config.to_dict(),
        weights={name: value.numpy() for name, value in model.state_dict().items()},
        prompt=prompt,
        positions=_joined([step["position_ids"][-3:, 0] for step in seen], axis=1),
        embeddings=_joined([step["inputs_embeds"][0] for step in seen], axis=0),
        deepstack=_deepstack(seen),
        logits=_joined(logits, axis=0),
    )


def rope_index(model, ids, types, grids) -> tuple[np.ndarray, int]:
    """transformers' own positions [3, N] and delta of a prompt, grids as in Prompt."""
    given = {
        f"{kind}_grid_thw": torch.tensor(np.array(rows)) if len(rows) else None
        for kind, rows in grids.items()
    }
    positions, delta = model.model.get_rope_index(
        torch.tensor([list(ids)]),
        mm_token_type_ids=torch.tensor([list(types)]),
        **given,
    )
    return positions[:, 0].numpy(), int(delta)


def _run(model, prompt: Prompt):
    """The decoder's inputs and logits, step by step."""
    seen: list[dict[str, Any]] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        made = model(**_tensors(prompt), use_cache=True)
        logits = [made.logits[0]]
        for token in prompt.answer.tolist():
            # With a cache it adds its own delta to the index of the token.
            ids = torch.tensor([[token]])
            made = model(input_ids=ids, cache=made.cache, use_cache=True)
            logits.append(made.logits[0])
    hook.remove()
    return seen, logits


def _deepstack(seen) -> np.ndarray:
    """The features added after the first layers; zero where there are none."""
    first, (length, width) = seen[0], seen[0]["inputs_embeds"].shape[1:]
    added = first.get("deepstack_visual_embeds") or []
    made = np.zeros((len(added), length + ANSWER, width), np.float32)
    for layer, features in enumerate(added):
        where = first["visual_pos_masks"][0].nonzero()[:, 0].numpy()
        made[layer, where] = features.numpy()
    return made


def _joined(parts, axis: int) -> np.ndarray:
    return np.concatenate([part.numpy() for part in parts], axis)


def _tensors(prompt: Prompt) -> dict[str, Any]:
    made = {
        "input_ids": prompt.ids[None].astype(np.int64),
        "mm_token_type_ids": prompt.types[None],
        "pixel_values": prompt.pixels["image"],
        "pixel_values_videos": prompt.pixels["video"],
        "image_grid_thw": prompt.grids["image"],
        "video_grid_thw": prompt.grids["video"],
    }
    return {name: torch.from_numpy(np.array(value)) for name, value in made.items()}


def make_model(family: str):
    """The model with random weights, none of them at its default."""
    torch.manual_seed(0)
    config = {"qwen2_vl": _qwen2_vl_config, "qwen3_vl": _qwen3_vl_config}[family]()
    name = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL"}[family]
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.5 if name.endswith("bias") else 0.3)
            if name.endswith("weight") and weight.ndim == 1:  # a norm's
                weight.add_(1)
    model.set_attn_implementation("eager")
    return model.eval()


_VISION = {"depth": 2, "num_heads": 4, "spatial_merge_size": MERGE}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
_IDS = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def _qwen2_vl_config():
    rope = {"rope_type": "default", "rope_theta": 1e6}
    rope["mrope_section"] = list(SECTIONS["qwen2_vl"])
    return transformers.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config={**_VISION, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2},
        **_IDS,
        tie_word_embeddings=True,
    )


def _qwen3_vl_config():
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    rope["mrope_section"] = list(SECTIONS["qwen3_vl"])
    vision = {"hidden_size": 64, "out_hidden_size": 128, "intermediate_size": 128}
    return transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 32, "rope_parameters": rope},
        vision_config={**_VISION, **vision, "deepstack_visual_indexes": [0, 1]},
        **_IDS,
        tie_word_embeddings=True,
    )


def make_prompt(family: str, patch_size: int) -> Prompt:
    """Text, a picture, text, a video, text, a picture, text."""
    process = transformers.Qwen2VLImageProcessorPil(
        patch_size=patch_size, min_pixels=56 * 56, max_pixels=28 * 28 * 30
    )
    pictures = process(images=[_picture(90, 130, 0), _picture(400, 140, 1)])
    # 16 frames, so 8 steps of time and more than a frame has rows: here transformers
    # from 5.3 on lets the text that follows run into the video's positions.
    pixels, grid = _video(process, [_picture(60, 110, seed) for seed in range(16)])
    random = np.random.default_rng(7)

    def words(count: int) -> list[int]:
        return random.integers(WORDS, size=count).tolist()

    first, second = (_medium(IMAGE_PAD, size) for size in pictures["image_grid_thw"])
    if family == "qwen2_vl":
        video = _medium(VIDEO_PAD, grid)
    else:  # a frame follows its time, which is text
        frame = _medium(VIDEO_PAD, [1, *grid[1:]])
        video = [token for _ in range(grid[0]) for token in (*words(3), *frame)]
    ids = np.array(
        [*words(9), *first, *words(5), *video, *words(6), *second, *words(17)], np.int32
    )
    return Prompt(
        ids=ids,
        types=np.select([ids == IMAGE_PAD, ids == VIDEO_PAD], [1, 2], 0),
        answer=np.array(words(ANSWER), np.int32),
        pixels={"image": np.array(pictures["pixel_values"]), "video": pixels},
        grids={"image": pictures["image_grid_thw"], "video": np.array([grid])},
    )


def _medium(pad: int, grid) -> list[int]:
    count = int(np.prod(grid)) // MERGE**2
    return [VISION_START, *[pad] * count, VISION_END]


def _picture(height: int, width: int, seed: int):
    """A smooth coloured pattern with noise."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width] / 40 + seed
    waves = np.stack([np.sin(rows), np.cos(columns), np.sin(rows * columns)], axis=-1)
    noisy = 128 + 90 * waves + random.normal(0, 12, waves.shape)
    return image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def _video(process, frames) -> tuple[np.ndarray, list[int]]:
    """Patches of a video: as of its frames, but two frames share a patch.

    The processor repeats a picture along the patch's time axis, where a video has one
    frame after another.
    """
    made, patch = process(images=frames), process.patch_size
    _, height, width = (int(size) for size in made["image_grid_thw"][0])
    patches = np.array(made["pixel_values"]).reshape(
        len(frames) // 2, 2, height * width, 3, 2, patch, patch
    )
    both = np.stack([patches[:, 0, :, :, 0], patches[:, 1, :, :, 1]], axis=3)
    return both.reshape(-1, 6 * patch**2), [len(frames) // 2, height, width]
