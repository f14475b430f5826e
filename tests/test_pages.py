"""Lists in the documentation hold what the code has."""

import re
from pathlib import Path

import jax
from positions_golden import FOLDER

import jrope
from jrope._model_types import MODEL_TYPES
from jrope._routes import BY_NAME, route_names, routes_for
from jrope.positions._families import ALIASES, FAMILIES
from jrope.positions._rule import NO_TOKEN
from jrope.scalings import SCALINGS, config_keys

LETTER_TABLE = "| letter | is |"
FAMILY_TABLE = "| family | also called | media |"
SCALING_TABLE = "| rope_type | what it does | fields |"
ROUTE_TABLE = "| name | platforms | what it is | chosen by itself |"
PAGES = Path(__file__).parents[1] / "docs" / "pages"


def rows(page, head):
    """Cells of the table that begins so."""
    table = (PAGES / page).read_text().partition(f"{head}\n")[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()[1:]
    ]


def media(spec):
    ids = {
        "images": spec.image_token_id,
        "videos": spec.video_token_id,
        "audio": spec.audio_token_id,
    }
    return ", ".join(name for name, token in ids.items() if token != NO_TOKEN)


def test_the_letters_are_those_of_the_package():
    listed = [letter for letter, _ in rows("reference.md", LETTER_TABLE)]
    said = (
        (jrope.__doc__ or "").partition("Letters in shapes:")[2].partition(" star")[0]
    )
    assert listed == re.findall(r"\b([B-Z]|A(?= axes)) \w", said)


def test_every_family_is_listed():
    listed = {
        name.strip("`"): (set(re.findall(r"`(\w+)`", others)), shown)
        for name, others, shown in rows("multimodal.md", FAMILY_TABLE)
    }
    expected = {
        name: ({alias for alias, of in ALIASES.items() if of == name}, media(spec))
        for name, spec in FAMILIES.items()
        if name != "text"
    }
    assert listed == expected


def test_the_numbers_of_families():
    page = (PAGES / "multimodal.md").read_text()
    readme = (PAGES.parents[1] / "README.md").read_text()
    families = set(FAMILIES) - {"text"}
    names = families | set(ALIASES)
    assert f"knows {len(families)} families under {len(names)} names" in page
    assert f"[{len(families)} families]" in readme
    untested = families - {path.stem for path in FOLDER.glob("*.npz")}
    tested = f"test {len(families) - len(untested)} of them; "
    said = page.partition(tested)[2].partition(" are Qwen2.5-VL")[0]
    assert set(re.findall(r"`(\w+)`", said)) == untested


def test_every_scaling_is_listed_with_its_fields():
    listed = {
        re.findall(r"`([^`]+)`", row[0])[0]: row[2]
        for row in rows("scalings.md", SCALING_TABLE)
    }
    assert list(listed) == list(SCALINGS)
    for rope_type, scaling in SCALINGS.items():
        fields = set(config_keys(scaling))
        said = set(re.findall(r"`(\w+)`", listed[rope_type]))
        if "as `yarn`" in listed[rope_type]:
            said = said - {"yarn"} | set(config_keys(SCALINGS["yarn"]))
        assert said == fields, rope_type


def test_the_model_types_that_give_a_whole_head_of_mla():
    page = (PAGES / "layers.md").read_text()
    said = page.partition("mscale_all_dim`.")[2].partition(" alone give the whole")[0]
    whole = {name for name, model in MODEL_TYPES.items() if model.trailing}
    assert set(re.findall(r"`(\w+)`", said)) == whole


def test_every_route_is_listed():
    listed = rows("platforms.md", ROUTE_TABLE)
    assert {row[0].strip("`") for row in listed} == set(route_names())
    never = {row[0].strip("`"): row[1] for row in listed if row[3] == "never"}
    assert never == {
        route.name: platform for platform, routes in BY_NAME.items() for route in routes
    }
    everywhere = {row[0].strip("`") for row in listed if row[1] == "all"}
    for platform in (jax.default_backend(), "tpu", "of a vendor"):
        assert everywhere <= {route.name for route in routes_for(platform)}
