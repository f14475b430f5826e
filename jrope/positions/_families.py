"""The families: one row each. A new one is a row, or a flag that a kernel learns.

Ids and sizes are those of the released models, or else of transformers' config classes
(tests/golden/position_configs.json); a config overrides them.

Sources: the families' `get_rope_index` in transformers 5.24.0; vLLM 0.33.0's
`get_mrope_input_positions` for keye, keye_vl1_5, openpangu_vl, isaac and qwen3_asr.
"""

import dataclasses

from jrope.positions._spec import PositionSpec

_QWEN2_VL = PositionSpec(
    family="qwen2_vl",
    image_token_id=151655,
    video_token_id=151656,
    vision_start_token_id=151652,
    vision_end_token_id=151653,
    hf5_differs=True,
)
_QWEN2_5_VL = dataclasses.replace(
    _QWEN2_VL,
    family="qwen2_5_vl",
    time="rate_times_seconds",
    tokens_per_second=2.0,
    default_seconds=1.0,
)
# Time is text between the frames: every frame is a grid of its own.
_QWEN3_VL = dataclasses.replace(
    _QWEN2_VL, family="qwen3_vl", per_frame="video", hf5_differs=False
)
_GLM4V = PositionSpec(
    family="glm4v",
    image_token_id=151343,
    video_token_id=151344,
    video_start_token_id=151341,
    video_end_token_id=151342,
    per_frame="video",
)
_OMNI = dataclasses.replace(
    _QWEN2_VL,
    family="qwen2_5_omni",
    audio_token_id=151646,
    audio_start_token_id=151647,
    audio_end_token_id=151648,
    time="frame_times_seconds",
    tokens_per_second=25.0,
    image_rate=25.0,
    audio_tokens="two_convolutions",
    audio_in_video="chunks",
    audio_chunk=50,
    hf5_differs=False,
)
_HUNYUAN_VL = PositionSpec(
    family="hunyuan_vl",
    axes=4,
    image_token_id=120120,
    extra_column=True,
    layout="ordinal",
    row_t=3,
    row_h=2,
    row_w=1,
    row_index=0,
)

_ROWS = (
    PositionSpec(family="text", axes=1, row_h=0, row_w=0),
    _QWEN2_VL,
    _QWEN2_5_VL,
    dataclasses.replace(
        _QWEN2_5_VL, family="exaone4_5", image_token_id=67, video_token_id=68
    ),
    _QWEN3_VL,
    dataclasses.replace(
        _QWEN3_VL,
        family="cosmos3_edge",
        image_token_id=19,
        video_token_id=18,
        vision_start_token_id=20,
        vision_end_token_id=21,
    ),
    dataclasses.replace(
        _QWEN3_VL,
        family="cohere_compass",
        image_token_id=255031,
        video_token_id=255032,
        vision_start_token_id=255028,
        vision_end_token_id=255029,
    ),
    dataclasses.replace(
        _QWEN3_VL,
        family="qwen3_5",
        image_token_id=248056,
        video_token_id=248057,
        vision_start_token_id=248053,
        vision_end_token_id=248054,
    ),
    _OMNI,
    dataclasses.replace(
        _OMNI,
        family="qwen3_omni_moe",
        audio_token_id=151675,
        audio_start_token_id=151669,
        audio_end_token_id=151670,
        tokens_per_second=13.0,
        image_rate=13.0,
        audio_tokens="blocks_of_100",
        audio_in_video="tokens",
        fractional=True,
    ),
    _GLM4V,
    dataclasses.replace(
        _GLM4V, family="glm4v_moe", image_token_id=151363, video_token_id=151364
    ),
    dataclasses.replace(
        _GLM4V,
        family="glm46v",
        video_start_token_id=151361,
        video_end_token_id=151362,
    ),
    dataclasses.replace(
        _GLM4V,
        family="glm_ocr",
        image_token_id=59280,
        video_token_id=59281,
        video_start_token_id=59258,
        video_end_token_id=59259,
    ),
    PositionSpec(
        family="glm_image",
        image_token_id=167855,
        spatial_merge_size=1,
        decodes_images=True,
    ),
    PositionSpec(
        family="ernie4_5_vl_moe",
        image_token_id=100295,
        video_token_id=103367,
        video_start_token_id=101306,
        video_end_token_id=101307,
        temporal_merge_size=2,
        hf5_differs=True,
    ),
    dataclasses.replace(
        _QWEN2_VL,
        family="paddleocr_vl",
        image_token_id=100295,
        video_token_id=100296,
        vision_start_token_id=101305,
        vision_end_token_id=101306,
    ),
    dataclasses.replace(_QWEN3_VL, family="keye"),
    dataclasses.replace(_QWEN3_VL, family="keye_vl1_5"),
    dataclasses.replace(_QWEN3_VL, family="openpangu_vl"),
    _HUNYUAN_VL,
    dataclasses.replace(
        _HUNYUAN_VL,
        family="hunyuan_vl_3ax",
        axes=3,
        row_t=2,
        row_h=1,
        row_w=0,
        row_index=-1,
    ),
    # A frame begins where the one before it ends on every axis, max(H, W + 1) further.
    PositionSpec(
        family="hy_v4_vl",
        image_token_id=120120,
        video_token_id=120124,
        extra_column=True,
        per_frame="all",
    ),
    PositionSpec(family="isaac", image_token_id=151655, layout="cursor_in_time"),
    PositionSpec(
        family="minicpmv4_7",
        image_token_id=151655,
        video_token_id=151656,
        spatial_merge_size=4,
        canvas=(151700, 151701, 151702, 151703, 198),
    ),
    PositionSpec(
        family="qwen3_asr", audio_token_id=151676, audio_tokens="blocks_of_100"
    ),
)

FAMILIES: dict[str, PositionSpec] = {row.family: row for row in _ROWS}

# Other names of the same rule and ids: sizes of a family, and models that took it over.
# OpenCUA's own ids stand in its config only.
ALIASES: dict[str, str] = {
    "opencua": "qwen2_5_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "cosmos3_omni": "qwen3_vl",
    "qwen3_5_moe": "qwen3_5",
    "qwen4_exp": "qwen3_5",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "qwen3_omni_moe_talker": "qwen3_omni_moe",
    "KeyeVL1_5": "keye_vl1_5",
    "Keye": "keye",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
}
