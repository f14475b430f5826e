"""Configs that no model has: large, deep, twisted. Each is refused by name, shortly."""

import json
import math
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from jrope import config_from_hf, layers_from_hf, mrope_axes, vision_config_from_hf
from jrope._show import show
from jrope.explain import explain, to_text

PLAIN = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
}
LONGEST_MESSAGE = 600


def refused(config, *, match, read=config_from_hf):
    with pytest.raises((ValueError, TypeError), match=match) as caught:
        read(config)
    assert len(str(caught.value)) < LONGEST_MESSAGE


@pytest.fixture
def written(tmp_path):
    """Writes a config.json and gives its path."""

    def write(content):
        path = tmp_path / "config.json"
        if isinstance(content, str):
            content = content.encode()
        path.write_bytes(content)
        return path

    return write


def test_ten_megabytes_of_other_keys_are_read(written):
    filler = {"vocab": ["0123456789"] * 800_000}
    path = written(json.dumps({**PLAIN, **filler}))
    assert path.stat().st_size > 10_000_000
    assert config_from_hf(path) == config_from_hf(PLAIN)


@pytest.mark.parametrize(
    ("rope", "match"),
    [
        ({"rope_type": "x" * 10_000_000}, "rope_type must be one of"),
        ({f"key{i}": i for i in range(100_000)}, "got unknown .'key0', 'key1'"),
        ({"rope_type": "yarn", "factor": "9" * 10_000_000}, "factor must be a number"),
        ({"mrope_section": [1] * 1_000_000}, "mrope_section must sum to"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 1_000_000,
                "long_factor": [1.0] * 1_000_000,
                "original_max_position_embeddings": 64,
            },
            "short_factor must have at most 32768 entries",
        ),
    ],
    ids=["type", "keys", "factor", "section", "lists"],
)
def test_messages_do_not_repeat_megabytes(rope, match):
    refused({**PLAIN, "rope_scaling": rope}, match=match)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"text_config": ' * 400 + json.dumps(PLAIN) + "}" * 400,
        '{"a": ' * 100_000,
    ],
    ids=["lists", "text models", "open"],
)
def test_deep_nesting_in_a_file(written, text):
    refused(written(text), match="must be JSON: |must not nest deeper than 64 levels")


def test_deep_nesting_and_circles_in_a_mapping():
    deep = PLAIN
    for _ in range(100_000):
        deep = {"text_config": deep}
    circle = {**PLAIN}
    circle["text_config"] = circle
    many = {**PLAIN}
    many["a"] = many["b"] = [many, {"c": many}]
    for config in (deep, circle, many, {**PLAIN, "rope_scaling": deep}):
        for read in (config_from_hf, layers_from_hf, vision_config_from_hf):
            refused(config, read=read, match="must not nest deeper than 64 levels")


def test_real_depths_are_read():
    deep = {"a": 1}
    for _ in range(60):
        deep = {"a": [deep] if "b" in deep else deep}
    assert config_from_hf({**PLAIN, "quantization_config": deep}) is not None


# Python's json takes the last of two keys in silence.
@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            '{"rope_theta": 1e4, "rope_theta": 1e6}',
            "key must stand once in an object, got 'rope_theta' as 10000.0 and 1000000",
        ),
        (
            '{"rope_scaling": {"factor": 2, "rope_type": "linear", "factor": 4}}',
            "key must stand once in an object, got 'factor' as 2 and 4",
        ),
        ('{"a": ' + "9" * 5000 + "}", "must be JSON: Exceeds the limit"),
        ("", "must be JSON"),
        ("[]", "hf_config must be a mapping"),
        (b"\xff\xfe{\x00}\x00", "must be JSON: 'utf-8' codec"),
        (b"\xef\xbb\xbf{}", "must be JSON: Unexpected UTF-8 BOM"),
    ],
)
def test_files_that_are_no_config(written, text, match):
    refused(written(text), match=match)


def test_a_key_that_stands_twice_alike_is_no_doubt(written):
    text = json.dumps(PLAIN)[:-1] + ', "rope_theta": 10000.0}'
    assert config_from_hf(written(text)) == config_from_hf(PLAIN)


def test_files_are_read_as_utf_8_wherever_one_is(written):
    path = written(json.dumps({**PLAIN, "name": "\u00e9"}, ensure_ascii=False))
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "jrope", "explain", str(path)],
        env={**os.environ, **ascii_only},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    2**63,
    10**400,
    10**5000,
    5e-324,
    -0.0,
    "128",
    "",
    "nan",
    True,
    [],
    {},
    [[8]],
    {"a": [1]},
    b"8",
    1j,
    object(),
    np.array([8, 8]),
    np.array(8),
    np.int64(8),
]
NUMBER_KEYS = [
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "rope_theta",
    "head_dim",
    "rotary_dim",
    "partial_rotary_factor",
]


@pytest.mark.parametrize("key", NUMBER_KEYS)
@pytest.mark.parametrize("value", NUMBERS, ids=[show(v)[:12] for v in NUMBERS])
def test_numbers_that_are_none(key, value):
    """Refused with the key's name (or its consequence's), or a size that exists."""
    words = f"{key}|head_dim|rotary|int32|frequencies|width"
    try:
        made = config_from_hf({**PLAIN, key: value})
    except (ValueError, TypeError) as error:
        assert any(word in str(error) for word in words.split("|")), error
        assert len(str(error)) < LONGEST_MESSAGE
        return
    assert made is not None
    assert key == "rope_theta" and value in (2**63, 5e-324, 8)


YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
LLAMA = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Each has lengths of its own, and divides by them.
LENGTHS = [
    ("original_max_position_embeddings", YARN),
    ("original_max_position_embeddings", {**YARN, "rope_type": "deepseek_yarn"}),
    ("original_max_position_embeddings", {**YARN, "rope_type": "telechat3-yarn"}),
    ("original_max_position_embeddings", LONG),
    ("original_max_position_embeddings", LLAMA),
    ("max_trained_positions", {"rope_type": "dynamic", "factor": 2.0}),
]


@pytest.mark.parametrize("length", [2**31, 10**400], ids=["2^31", "10^400"])
@pytest.mark.parametrize(
    ("key", "rope"), LENGTHS, ids=[rope["rope_type"] for _, rope in LENGTHS]
)
def test_lengths_that_int32_cannot_number(key, rope, length):
    own = {**PLAIN, "rope_scaling": {**rope, key: 64}}
    assert config_from_hf(own) is not None
    refused({**own, "max_position_embeddings": length}, match="max_position.*int32")
    longer = {**PLAIN, "rope_scaling": {**rope, key: length}}
    refused(longer, match=f"{key} must fit int32 positions")


@pytest.mark.parametrize(
    ("rope", "match"),
    [
        ({**YARN, "attention_factor": 5e-324}, "attention_factor must be a positive"),
        ({**YARN, "attention_factor": 1e39}, "attention_factor must be a positive"),
        (
            {**YARN, "rope_type": "deepseek_yarn", "mscale_all_dim": 1e300},
            "softmax_scale_factor must be a positive float32.*got inf",
        ),
        # Its lists are too long to show, and the key that is wrong must be named.
        (
            {**LONG, "short_mscale": 1e300, "long_mscale": 1.0},
            "short_mscale must be a positive float32",
        ),
        ({**LONG, "long_mscale": 1e-300}, "long_mscale must be a positive float32"),
    ],
    ids=["attention 0", "attention inf", "softmax inf", "short", "long"],
)
def test_factors_that_float32_cannot_hold(rope, match):
    refused({**PLAIN, "rope_scaling": rope}, match=match)


@pytest.mark.parametrize("key", ["long_mscale", "long_factor"])
def test_what_only_long_requests_need_is_checked_when_read(key):
    wrong = {"long_mscale": 1e300, "long_factor": [2.0] * 7}[key]
    match = {"long_mscale": "long_mscale must", "long_factor": "= 8 entries"}[key]
    assert config_from_hf({**PLAIN, "rope_scaling": LONG}) is not None
    refused({**PLAIN, "rope_scaling": {**LONG, key: wrong}}, match=match)


def test_a_factor_beyond_all_tables_is_explained():
    config = config_from_hf({**PLAIN, "rope_scaling": {**YARN, "factor": 1e308}})
    assert config is not None
    assert "max_position_embeddings=2147483647" in explain(config).warnings[0]


def test_a_base_that_only_its_scaling_mends_is_explained():
    rope = {"rope_type": "dynamic", "alpha": 3.0}
    config = config_from_hf(
        {**PLAIN, "head_dim": 44, "rope_theta": 5e-324, "rope_scaling": rope}
    )
    assert config is not None
    assert to_text(explain(config))


def test_counts_of_layers_are_bounded():
    for count in (10**9, 10**400, -1, "4", np.array([1, 2])):
        refused(
            {**PLAIN, "num_hidden_layers": count},
            match="num_hidden_layers must be",
            read=layers_from_hf,
        )


def test_sizes_are_refused_before_anything_is_made():
    tracemalloc.start()
    for section, width in (((10**12, 1), 2 * 10**12 + 2), ((10**9, 10**9), 4 * 10**9)):
        with pytest.raises(ValueError, match="rotary_dim must be at most 65536"):
            mrope_axes(section, rotary_dim=width)
    refused({**PLAIN, "head_dim": 10**12}, match="head_dim must be at most 65536")
    refused({**PLAIN, "hidden_size": 4 * 10**12}, match="head_dim must be at most 6553")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_orders_of_any_type_are_refused():
    for order in ([], {}, None, 3, object()):
        with pytest.raises(ValueError, match="order must be one of .*'chunked'"):
            mrope_axes((1, 1), rotary_dim=4, order=order)  # pyright: ignore


def test_what_is_shown_ends():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "[[[[[...]]]]]"
    assert show({"a": 1.5, "b": None}) == "{'a': 1.5, 'b': None}"
    assert len(show(["x" * 1000] * 1000)) < 24 * 130
    assert show(-(10**400)) == "an int of 1329 bits"
    assert show(2**63) == str(2**63)
