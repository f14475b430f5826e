"""What a compiler that wants static shapes and plain types can be handed."""

import re

ROTATION = {
    *("add", "broadcast_in_dim", "composite", "concatenate", "constant", "convert"),
    *("gather", "maximum", "multiply", "negate", "reshape", "slice", "subtract"),
}
FORBIDDEN = (
    *(r"tensor<[^>]*\?", r"tensor<[^>]*complex", r"tensor<[^>]*xf64"),
    *(r"tensor<[^>]*xi64", r"tensor<i64", r"tensor<f64", "custom_call", "dynamic"),
)
COMPOSITE = 'stablehlo.composite "jrope.apply_rope"'


def operations(text):
    """Names of the StableHLO operations in a program, generic form included."""
    return set(re.findall(r"= \"?(?:stablehlo|chlo|mhlo)\.([a-z_0-9]+)", text))


def assert_static(text, *, allowed=()):
    """One kind of gather and arithmetic, and nothing that needs values or wide types.

    `#stablehlo.gather<...>` is the attribute that says which kind.
    """
    unwanted = [pattern for pattern in FORBIDDEN if re.search(pattern, text)]
    assert not unwanted, (unwanted, text)
    assert operations(text) <= ROTATION | set(allowed), operations(text)
    kinds = re.findall(r"#stablehlo\.gather<(.*?)>,", text)
    assert len(set(kinds)) <= 1, kinds


def composites(text):
    """(x, cos, sin, mode, version) of every composite: types as text, then integers."""
    found = re.findall(
        re.escape(COMPOSITE) + r" .*?mode = (\d+) : i32.*?version = (\d+).*?: "
        r"\(tensor<(.*?)>, tensor<(.*?)>, tensor<(.*?)>\) -> tensor<(.*?)>",
        text,
    )
    assert len(found) == text.count(COMPOSITE)
    assert all(x == out for _, _, x, _, _, out in found)
    return [(x, c, s, int(mode), int(v)) for mode, v, x, c, s, _ in found]
