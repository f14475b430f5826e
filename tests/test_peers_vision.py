"""Two-dimensional rotary embedding in vision towers, against transformers' own.

The towers see a blank picture; what matters is where its patches are. `make peers`.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jrope
from jrope.positions import vision_positions

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

HEADS = 2
FAULT = 0.5  # every fault below moves some feature by more: features are about 1
# transformers' angle: a float32 power, off by up to 4 units in the last place, and a
# float32 product. Then cos and sin, theirs off by a unit and ours by half of one.
ANGLE_ERROR = 5 * 2.0**-24
ROW_ERROR = 1.5 * 2.0**-23


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """A vision tower of transformers, one layer deep.

    Args:
      config: of the whole multimodal model.
      grids: T, H, W in patches of what it sees.
      order: of its patches, a choice of `vision_positions`.
      merge: spatial_merge_size, where patches lie in blocks.
      rows: what its rotary module gave for those, as it is.
      apply: its function that rotates [N, HEADS, H] with such rows.
    """

    config: Any
    grids: list[list[int]]
    order: Any
    merge: int | None
    rows: Any
    apply: Callable[[Any, Any, Any], tuple[Any, Any]]

    def rotated(self, query: np.ndarray, key: np.ndarray) -> list[np.ndarray]:
        made = self.apply(torch.tensor(query), torch.tensor(key), self.rows)
        return [array.numpy() for array in made]


def seen_by(rotary, run) -> Any:
    """What the rotary module of a tower returns while `run` runs it."""
    seen: list[Any] = []
    hook = rotary.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        run()
    hook.remove()
    (rows,) = seen
    return rows


def qwen(family: str, names: tuple[str, str], vision: dict[str, Any]) -> Tower:
    """Patches in blocks of 2 x 2, to be merged; a video frame by frame."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, names[0])(vision_config={"depth": 1, **vision})
    tower = getattr(module, names[1])(config.vision_config)
    grids = [[1, 8, 12], [3, 4, 6], [1, 16, 6]]
    width = 3 * 2 * config.vision_config.patch_size**2
    patches = torch.zeros(sum(t * h * w for t, h, w in grids), width)
    return Tower(
        config=config,
        grids=grids,
        order="merge_blocks",
        merge=2,
        rows=seen_by(tower.rotary_pos_emb, lambda: tower(patches, torch.tensor(grids))),
        apply=lambda q, k, rows: module.apply_rotary_pos_emb_vision(q, k, *rows),
    )


def pixtral() -> Tower:
    """Patches row by row; frequencies go to height and width by turns."""
    module = transformers.models.pixtral.modeling_pixtral
    vision = transformers.PixtralVisionConfig(num_hidden_layers=1)
    tower = module.PixtralVisionModel(vision)
    grids = [[1, 5, 9], [1, 8, 3]]
    sizes = [[h * vision.patch_size, w * vision.patch_size] for _, h, w in grids]
    pixels = torch.zeros(2, 3, *np.max(sizes, axis=0).tolist())
    rows = seen_by(
        tower.patch_positional_embedding,
        lambda: tower(pixels, image_sizes=torch.tensor(sizes)),
    )
    return Tower(
        config=transformers.LlavaConfig(vision_config=vision),
        grids=grids,
        order="row_major",
        merge=None,
        rows=rows,
        apply=lambda q, k, made: module.apply_rotary_pos_emb(q, k, *made),
    )


def llama4() -> Tower:
    """Neighbouring features turn together; a class token ends a picture."""
    module = transformers.models.llama4.modeling_llama4
    vision = transformers.Llama4VisionConfig(  # of Llama-4-Scout but for its depth
        num_hidden_layers=1, hidden_size=1408, num_attention_heads=16, image_size=336
    )
    tower = module.Llama4VisionModel(vision)
    rows = seen_by(tower.rotary_embedding, lambda: tower(torch.zeros(1, 3, 336, 336)))

    def apply(query, key, made):
        made = module.vision_apply_rotary_emb(query[None], key[None], made)
        return made[0][0], made[1][0]

    return Tower(
        config=transformers.Llama4Config(vision_config=vision),
        grids=[[1, 24, 24]],
        order="one_based_with_cls",
        merge=None,
        rows=rows,
        apply=apply,
    )


TOWERS: dict[str, Callable[[], Tower]] = {
    "qwen2_vl": lambda: qwen(
        "qwen2_vl",
        ("Qwen2VLConfig", "Qwen2VisionTransformerPretrainedModel"),
        {"embed_dim": 1280},
    ),
    # Its windows permute tokens and rows alike, after the rotary module.
    "qwen2_5_vl": lambda: qwen(
        "qwen2_5_vl",
        ("Qwen2_5_VLConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
        {"hidden_size": 1280},
    ),
    "qwen3_vl": lambda: qwen(
        "qwen3_vl",
        ("Qwen3VLConfig", "Qwen3VLVisionModel"),
        {"deepstack_visual_indexes": []},
    ),
    "pixtral": pixtral,
    "llama4": llama4,
}


@functools.cache
def load(name: str) -> Tower:
    torch.manual_seed(0)
    return TOWERS[name]()


@pytest.fixture(params=sorted(TOWERS))
def tower(request) -> Tower:
    return load(request.param)


def vision_config(tower: Tower, spelling: str) -> jrope.RopeConfig:
    """Read from transformers' object, its config.json, or one as older files are."""
    if spelling == "object":
        return jrope.vision_config_from_hf(tower.config)
    config = tower.config.to_dict()
    if spelling == "older":
        vision = dict(config["vision_config"])
        theta = vision.pop("rope_parameters")["rope_theta"]
        # Qwen's files have no base at all.
        named = {} if tower.order == "merge_blocks" else {"rope_theta": theta}
        config = {**config, "vision_config": {**vision, **named}}
    return jrope.vision_config_from_hf(config)


def positions_of(tower: Tower) -> np.ndarray:
    return vision_positions(
        tower.grids, order=tower.order, spatial_merge_size=tower.merge
    )


def features(tower: Tower) -> tuple[np.ndarray, np.ndarray]:
    made = tower.rows[0] if isinstance(tower.rows, tuple) else tower.rows[:, 0]
    width = made.shape[-1] * (1 if isinstance(tower.rows, tuple) else 2)
    random = np.random.default_rng(1)
    shape = (2, len(made), HEADS, width)
    query, key = random.standard_normal(shape).astype(np.float32)
    return query, key


def rotated(config, layout, positions, query, key) -> list[np.ndarray]:
    table = jnp.asarray(jrope.compute_cos_sin_cache(config))
    cos, sin = jrope.lookup(table, jnp.asarray(positions), layout=layout)
    made = jrope.rotate(jnp.asarray(query), jnp.asarray(key), cos, sin, layout=layout)
    return [np.asarray(array) for array in made]


def tolerance(x: np.ndarray, layout, positions: np.ndarray) -> np.ndarray:
    """For two float32 rotations whose angles differ by float32 arithmetic."""
    # No frequency is above 1, so no angle is above the larger position.
    angle = positions.max(axis=0)[:, None, None]
    pairing = layout.is_neox_style
    ones = np.ones((len(x), layout.rotary_dim // 2))
    first, second = oracle.pairs(layout.rotary_dim, 0, pairing)
    size = np.empty_like(x, np.float64)
    size[..., first] = size[..., second] = np.abs(x[..., first]) + np.abs(
        x[..., second]
    )
    arithmetic = oracle.bound(x, ones, ones, is_neox_style=pairing, dtype=np.float32)
    return 2 * arithmetic + size * (angle * ANGLE_ERROR + ROW_ERROR)


@pytest.mark.parametrize("spelling", ["object", "newer", "older"])
def test_rotation(tower, spelling):
    config, positions = vision_config(tower, spelling), positions_of(tower)
    query, key = features(tower)
    assert positions.shape == (2, len(query)) and positions.dtype == np.int32
    assert config.layout.position_axes == 2
    assert config.layout.rotary_dim == config.head_dim == query.shape[-1]
    made = rotated(config, config.layout, positions, query, key)
    for x, ours, theirs in zip(
        (query, key), made, tower.rotated(query, key), strict=True
    ):
        limit = tolerance(x, config.layout, positions)
        oracle.assert_within(ours, theirs.astype(np.float64), limit)


def worst(tower: Tower, layout, positions) -> float:
    query, key = features(tower)
    config = vision_config(tower, "newer")
    made = rotated(config, layout or config.layout, positions, query, key)
    right = tower.rotated(query, key)
    return max(
        float(np.abs(ours - theirs).max())
        for ours, theirs in zip(made, right, strict=True)
    )


def test_height_and_width_swapped_are_seen(tower):
    assert worst(tower, None, positions_of(tower)[::-1]) > FAULT


def test_axes_by_turns_are_seen(tower):
    layout = vision_config(tower, "newer").layout
    by_turns = tuple(i % 2 for i in range(layout.rotary_dim // 2))
    wrong = dataclasses.replace(layout, axis_of_frequency=by_turns)
    assert worst(tower, wrong, positions_of(tower)) > FAULT


def test_the_other_pairing_is_seen(tower):
    layout = vision_config(tower, "newer").layout
    wrong = dataclasses.replace(layout, is_neox_style=not layout.is_neox_style)
    assert worst(tower, wrong, positions_of(tower)) > FAULT


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_patches_row_by_row_are_seen(name):
    tower = load(name)
    rows = vision_positions(tower.grids, order="row_major")
    assert worst(tower, None, rows) > FAULT


def test_a_class_token_that_turns_and_a_count_from_zero_are_seen():
    tower = load("llama4")
    positions = positions_of(tower)
    np.testing.assert_array_equal(positions[:, -1], 0)
    from_zero = np.maximum(positions - 1, 0)
    turning = positions.copy()
    turning[:, -1] = 1
    assert worst(tower, None, from_zero) > FAULT
    assert worst(tower, None, turning) > FAULT
