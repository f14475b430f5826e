"""tiny-qwen2-vl: Qwen2-VL's decoder with random weights, and pictures to show it.

Nothing is downloaded, and nothing can be learned from the answers: they are noise. But
positions, rotations and cache are those of the real model, and weights this wide apart
make every mistake in them visible. (With the usual spread of 0.02 attention is flat,
and a wrong rotation moves a logit by a thousandth.)
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jrope.demo.media import Kind, Medium
from jrope.demo.spec import ModelSpec
from jrope.demo.tokenizer import Tokenizer
from jrope.positions import spec as position_spec

SPREAD = 0.3  # standard deviation of weights and features
_SEED = 0

# The vocabulary: 256 bytes, then Qwen2-VL's special ids, then nothing that is ever fed.
_VISION_START, _VISION_END, _IMAGE, _VIDEO = range(256, 260)
_VOCABULARY = 320
_FEED_FORWARD = 128
_MERGE = 2  # patches a token, along rows and along columns
_PADS: dict[Kind, int] = {"image": _IMAGE, "video": _VIDEO}

SPEC = ModelSpec(
    architecture="qwen2vl",
    layers=4,
    width=64,
    heads=4,
    key_heads=2,
    head_dim=32,
    norm_eps=1e-6,
    context=1024,
    theta=1e4,
    window=None,
    mrope_section=(4, 5, 7),  # rows and columns differ, or their swap would not show
)
POSITIONS = position_spec(
    "qwen2_vl",
    image_token_id=_IMAGE,
    video_token_id=_VIDEO,
    vision_start_token_id=_VISION_START,
    vision_end_token_id=_VISION_END,
    spatial_merge_size=_MERGE,
)


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, as model.py lists them."""
    width = SPEC.width
    query, key = SPEC.heads * SPEC.head_dim, SPEC.key_heads * SPEC.head_dim
    of_layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (query, width),
        "attn_q.bias": (query,),
        "attn_k.weight": (key, width),
        "attn_k.bias": (key,),
        "attn_v.weight": (key, width),
        "attn_v.bias": (key,),
        "attn_output.weight": (width, query),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (_FEED_FORWARD, width),
        "ffn_up.weight": (_FEED_FORWARD, width),
        "ffn_down.weight": (width, _FEED_FORWARD),
    }
    shapes = {"token_embd.weight": (_VOCABULARY, width), "output_norm.weight": (width,)}
    for layer in range(SPEC.layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def random_tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """A float32 tensor of that name: the same each time, whatever was drawn before it.

    Norms are drawn around 1, all else around 0.
    """
    rng = np.random.default_rng([_SEED, *name.encode()])
    middle = 1.0 if "norm" in name else 0.0
    return rng.normal(middle, SPREAD, shape).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """An image or a video to be shown; its seed decides all that can be seen in it.

    Attributes:
      kind: which of the two.
      grid_thw: frames, rows and columns of patches; the last two even.
      seed: of its features.
    """

    kind: Kind
    grid_thw: tuple[int, int, int]
    seed: int

    def __str__(self) -> str:
        """For people."""
        return f"[{self.kind} {'x'.join(map(str, self.grid_thw))}]"

    def placed(self, start: int) -> Medium:
        """The picture in a prompt, its first feature in place of token `start`."""
        frames, rows, columns = self.grid_thw
        tokens = frames * (rows // _MERGE) * (columns // _MERGE)
        features = random_tensor(f"picture {self.seed}", (tokens, SPEC.width))
        return Medium(
            kind=self.kind, grid_thw=self.grid_thw, start=start, features=features
        )


def encode_parts(
    parts: Sequence[str | Picture], tokenizer: Tokenizer
) -> tuple[list[int], tuple[Medium, ...]]:
    """Token ids of texts and pictures in turn, and where the pictures are."""
    ids: list[int] = []
    media: list[Medium] = []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode_prompt(part)
            continue
        medium = part.placed(len(ids) + 1)
        pads = [_PADS[part.kind]] * len(medium.features)
        ids += [_VISION_START, *pads, _VISION_END]
        media.append(medium)
    return ids, tuple(media)


class ByteTokenizer:
    """A token a byte; nothing ends an answer but its length."""

    stop: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    encode_prompt = encode

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; noise is full of what cannot be printed, shown as U+FFFD."""
        text = bytes(index for index in ids if index < 256).decode(errors="replace")
        return "".join(each if each.isprintable() else "\ufffd" for each in text)
