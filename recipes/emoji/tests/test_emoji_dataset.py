"""The data set is built from clones by known rules, and its check notices any other value."""

import hashlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import emoji_dataset
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from emoji_content import COLUMNS, METADATA, compare, read_content
from emoji_rows import Emoji, captions_of, describe, key_of, list_rows, phrase_of, split_of, with_article
from PIL import Image
from typer.testing import CliRunner, Result


TONES = ["light", "medium-light", "medium", "medium-dark", "dark"]
STYLES = ["noto", "blob", "twemoji"]
# Name, keywords, group and subgroup of untoned emoji. File names and CLDR leave out the heart's variation selector.
BASES = {
    "2764-FE0F": ("red heart", ["emotion", "heart", "Red heart"], (0, 3)),
    "1F44B": ("waving hand", ["hello", "wave"], (1, 16)),
    "1F1E9-1F1EA": ("flag: Germany", ["flag"], (9, 98)),
}


def emoji(codepoints: str, name: str, *, base: str | None = None, base_name: str | None = None, **more) -> Emoji:
    values = {"keywords": [], "group": "people-body", "subgroup": "person", "siblings": 6, **more}
    return Emoji(codepoints, key_of(codepoints), base or key_of(codepoints), name, base_name or name, **values)


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def text_of(codepoints: str) -> str:
    return "".join(chr(int(point, 16)) for point in codepoints.split("-"))


def toned(codepoints: str) -> list[str]:
    return [f"{codepoints}-{0x1F3FB + tone:X}" for tone in range(5)]


@pytest.fixture
def clones(tmp_path):
    """Folders of the five repositories, with three emoji, five toned ones and a file that is not an emoji."""
    folders = {name: tmp_path / name for name in ("noto", "blobmoji", "twemoji", "cldr", "emojibase")}
    data: list[dict] = [{"hexcode": "1F1E9", "label": "regional indicator D"}]
    annotations, derived = {}, {}
    for codepoints, (name, keywords, (group, subgroup)) in BASES.items():
        entry = {"hexcode": codepoints, "group": group, "subgroup": subgroup}
        annotations[text_of(codepoints.removesuffix("-FE0F"))] = {"default": keywords, "tts": [name]}
        data.append(entry)
    data[2]["skins"] = [{"hexcode": toned_one, "group": 1, "subgroup": 16} for toned_one in toned("1F44B")]
    for codepoints, tone in zip(toned("1F44B"), TONES, strict=True):
        keywords = ["hello", f"{tone} skin tone", "wave"]
        derived[text_of(codepoints)] = {"default": keywords, "tts": [f"waving hand: {tone} skin tone"]}
    groups = {"0": "smileys-emotion", "1": "people-body", "9": "flags"}
    subgroups = {"3": "heart", "16": "hand-fingers-open", "98": "country-flag"}
    write_json(folders["twemoji"] / "emojibase.data.json", data)
    write_json(folders["emojibase"] / "packages/data/meta/groups.json", {"groups": groups, "subgroups": subgroups})
    cldr = folders["cldr"] / "cldr-json"
    write_json(
        cldr / "cldr-annotations-full/annotations/en/annotations.json",
        {"annotations": {"identity": {}, "annotations": annotations}},
    )
    write_json(
        cldr / "cldr-annotations-derived-full/annotationsDerived/en/annotations.json",
        {"annotationsDerived": {"annotations": derived}},
    )
    names = ["2764", "1f44b", "1f44b-1f3fb", "1f44b-1f3fd"]
    for folder in (folders["noto"], folders["blobmoji"]):
        (folder / "png/128").mkdir(parents=True)
        for i, name in enumerate([*names, "fe82b"]):
            sprite = Image.new("RGBA", (128, 128), (40 * i, 200, 20, 0))
            sprite.paste((40 * i, 90, 200, 128), (30, 30, 90, 90))
            sprite.save(folder / "png/128" / f"emoji_u{name.replace('-', '_')}.png")
    (folders["twemoji"] / "assets/svg").mkdir(parents=True)
    for name in [*names, "1f1e9-1f1ea"]:
        drawing = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 36 36"><circle cx="18" cy="18" r="9"/></svg>'
        (folders["twemoji"] / "assets/svg" / f"{name}.svg").write_text(drawing, encoding="utf-8")
    return folders


@pytest.fixture
def resvg(monkeypatch):
    """Makes a red square of any file."""

    def svg_to_bytes(svg_string: str, width: int, height: int, skip_system_fonts: bool) -> bytes:
        assert "<svg" in svg_string and skip_system_fonts
        buffer = io.BytesIO()
        Image.new("RGBA", (width, height), (200, 0, 0, 255)).save(buffer, "PNG")
        return buffer.getvalue()

    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=svg_to_bytes))


class Commands:
    """Runs the commands of the script."""

    def __init__(self, clones: dict[str, Path], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = [text for name, folder in clones.items() for text in (f"--{name}", str(folder))]
        self.out, self.monkeypatch = out, monkeypatch

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(emoji_dataset.app, [*arguments])

    def build(self, *arguments: str) -> Result:
        return self("build", *self.options, "--out", str(self.out), *arguments)

    def expect_built(self) -> None:
        """Let the script expect what it has built, in the place of the whole data set."""
        files = {name: read_content(self.out / f"{name}.parquet") for name in emoji_dataset.FILES}
        self.monkeypatch.setattr(emoji_dataset, "EXPECTED", files)


@pytest.fixture
def run(clones, tmp_path, monkeypatch):
    return Commands(clones, tmp_path / "out", monkeypatch)


def listed(clones: dict[str, Path]) -> list[tuple[Path, dict]]:
    folders = {"noto": clones["noto"], "blob": clones["blobmoji"], "twemoji": clones["twemoji"]}
    return list(list_rows(folders, clones["emojibase"], clones["cldr"]))


@pytest.mark.parametrize(
    "name, phrase, article",
    [
        ("red heart", "red heart", "a red heart"),
        ("alien", "alien", "an alien"),
        ("French fries", "French fries", "French fries"),
        ("wine glass", "wine glass", "a wine glass"),
        ("men wrestling", "men wrestling", "men wrestling"),
        ("mending heart", "mending heart", "mending heart"),
        ("no entry", "no entry", "no entry"),
        ("notebook", "notebook", "a notebook"),
        ("keycap: 3", "keycap 3", "keycap 3"),
        ("flag: Lithuania", "flag of Lithuania", "flag of Lithuania"),
        ("man: red hair", "man with red hair", "a man with red hair"),
        ("family: man, girl, boy", "family with man and girl and boy", "a family with man and girl and boy"),
    ],
)
def test_phrases_and_articles(name, phrase, article):
    assert (phrase_of(name), with_article(phrase_of(name))) == (phrase, article)


def test_captions_of_a_toned_emoji():
    one = emoji(
        "1f449-1f3ff",
        "backhand index pointing right: dark skin tone",
        keywords=["backhand", "finger", "hand", "index", "point"],
    )
    phrase = "backhand index pointing right with dark skin tone"
    assert captions_of(one, "noto") == [
        phrase,
        f"{phrase}, noto style",
        f"a {phrase}, glossy style",
        f"an emoji of a {phrase}",
        f"noto emoji: {phrase}",
        "backhand, finger, hand, index",
        f"{phrase} (backhand, finger), glossy style",
        "dark skin tone backhand index pointing right, noto style",
    ]
    flat = describe(one, "twemoji")
    assert flat["caption"] == f"{phrase}, flat style" and flat["captions"][2] == f"a {phrase}, twemoji style"


# Code points, name, and why it is held out: "train" if it is not.
SPLITS = [
    ("1f49a", "green heart", "heldout_color_shape"),
    ("1f44d-1f3fc", "thumbs up: medium-light skin tone", "heldout_skin_tone"),
    ("1f44d-1f3fd", "thumbs up: medium skin tone", "train"),
    ("1f4aa-1f3fe", "flexed biceps: medium-dark skin tone", "heldout_skin_tone"),
    *((f"1f385-{0x1F3FB + tone:x}", f"Santa Claus: {TONES[tone]} skin tone", "train") for tone in range(5)),
    ("1faf1-1f3ff-200d-1faf2-1f3fb", "handshake: dark skin tone, light skin tone", "heldout_two_tone"),
    ("1faf1-1f3fb-200d-1faf2-1f3fc", "handshake: light skin tone, medium-light skin tone", "train"),
    ("1f6b6-1f3fb-200d-2642-fe0f", "man walking: light skin tone", "heldout_gender_role"),
    ("1f6b6-1f3fb-200d-2640-fe0f", "woman walking: light skin tone", "train"),
    # Of two reasons the tone counts.
    ("1f468-1f3ff-200d-1f37c", "man feeding baby: dark skin tone", "heldout_skin_tone"),
    ("1f468-1f3fb-200d-1f37c", "man feeding baby: light skin tone", "heldout_gender_role"),
]


@pytest.mark.parametrize("codepoints, name, split", SPLITS)
def test_known_rows_are_held_out_in_all_styles(codepoints, name, split):
    one = emoji(codepoints, name, base_name=name.partition(":")[0])
    assert [split_of(one, style) for style in STYLES] == [split] * 3
    # Flags and components are never held out in one style.
    flag = emoji("1f1eb-1f1ee", "one", group="flags")
    assert {split_of(flag, style) for style in STYLES} == {"train"}
    assert "heldout_style" in {split_of(replace(flag, group="objects"), style) for style in STYLES}


def test_rows_are_in_the_order_of_styles_and_file_names(clones):
    rows = listed(clones)
    assert [(row["style"], row["codepoints"]) for _, row in rows] == [
        *(("noto", codepoints) for codepoints in ("1f44b", "1f44b-1f3fb", "1f44b-1f3fd", "2764-fe0f")),
        *(("blob", codepoints) for codepoints in ("1f44b", "1f44b-1f3fb", "1f44b-1f3fd", "2764-fe0f")),
        *(("twemoji", codepoints) for codepoints in ("1f1e9-1f1ea", "1f44b-1f3fb", "1f44b-1f3fd", "1f44b")),
        ("twemoji", "2764-fe0f"),
    ]
    hand = rows[1][1]
    assert hand["base"] == "1f44b" and hand["skin_tones"] == ["light skin tone"] and hand["weight"] == 1 / 6**0.5
    assert hand["keywords"] == ["hello", "wave"] and (hand["group"], hand["subgroup"]) == (
        "people-body",
        "hand-fingers-open",
    )
    heart = rows[3][1]
    assert heart["base"] == "2764" and heart["keywords"] == ["emotion", "heart"] and heart["weight"] == 1
    assert rows[8][1]["license"] == "CC-BY-4.0" and rows[8][1]["group"] == "flags"


def test_an_emoji_without_a_name_is_refused(clones):
    path = clones["cldr"] / "cldr-json/cldr-annotations-full/annotations/en/annotations.json"
    write_json(path, {"annotations": {"annotations": {}}})
    with pytest.raises(ValueError, match="no English name for 2764: check out"):
        listed(clones)


def test_another_folder_than_a_clone_is_refused(clones):
    with pytest.raises(ValueError, match="holds no emojibase.data.json: give the clone .* for --twemoji"):
        listed({**clones, "twemoji": clones["noto"]})
    with pytest.raises(ValueError, match="holds no .png files: give the clone .* for --blobmoji"):
        listed({**clones, "blobmoji": clones["cldr"]})


def test_building_twice_gives_the_same_files(run, resvg, tmp_path):
    refused = run.build()
    assert isinstance(refused.exception, ValueError) and "check out the commits" in str(refused.exception)
    run.expect_built()
    again = run.build("--reference", str(tmp_path / "out"))
    assert again.exit_code == 0, again.output
    counts = [line for line in again.output.splitlines() if "rows equal" in line]
    assert len(counts) == 2 * len(COLUMNS) and "same rows, pixels within" not in again.output
    assert read_content(tmp_path / "out" / "heldout.parquet").rows == 3
    found = pq.read_table(tmp_path / "out" / "train.parquet")
    assert found.schema.metadata[b"huggingface"] and found.column_names == ["image", "alpha", *METADATA]


def test_pictures_are_on_white_and_twemoji_in_the_middle(run, resvg, tmp_path):
    run.build()
    rows = {
        row["image"]["path"]: row
        for name in emoji_dataset.FILES
        for row in pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()
    }
    noto = {name: Image.open(io.BytesIO(rows["noto_2764-fe0f.webp"][name]["bytes"])) for name in ("image", "alpha")}
    assert noto["image"].size == (128, 128) and noto["image"].getpixel((5, 5)) == pytest.approx((255,) * 3, abs=3)
    assert noto["image"].getpixel((60, 60)) == pytest.approx((127, 172, 227), abs=6)
    assert noto["alpha"].convert("L").getpixel((60, 60)) == 128
    coverage = Image.open(io.BytesIO(rows["twemoji_1f44b.webp"]["alpha"]["bytes"])).convert("L")
    assert coverage.getbbox() == (6, 6, 122, 122)
    assert rows["twemoji_1f44b.webp"]["alpha"]["path"] == "twemoji_1f44b_a.webp"


def test_twemoji_without_resvg_is_refused(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    refused = run.build()
    assert str(refused.exception) == "Twemoji are SVG files, which need resvg: pip install resvg_py==0.5.0"
    assert not (tmp_path / "out").exists()


def change(path: Path, column: str, value: object) -> None:
    """Write the file again with another value in the first row."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    name, _, part = column.partition(".")
    rows[0][name] = {**rows[0][name], part: value} if part else value
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


@pytest.mark.every(5)
@pytest.mark.parametrize("column", [column for column in COLUMNS if column not in ("image", "alpha")])
def test_any_other_value_changes_the_digest(run, resvg, tmp_path, column):
    run.build()
    run.expect_built()
    path = tmp_path / "out" / "train.parquet"
    before = read_content(path)
    change(path, column, {"captions": ["a", "b"], "keywords": [], "skin_tones": ["x"], "weight": 0.5}.get(column, "x"))
    after = read_content(path)
    assert after.digest != before.digest and after.differing(before) == [column]
    refused = run("check", str(tmp_path / "out"))
    assert str(refused.exception).startswith(f"{column} in train.parquet are not what")


def to_webp(pixels: np.ndarray, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", **options)
    return buffer.getvalue()


def test_another_pixel_changes_the_digest_and_another_compression_does_not(run, resvg, tmp_path):
    run.build()
    run.expect_built()
    path, reference = tmp_path / "out" / "train.parquet", tmp_path / "reference" / "train.parquet"
    reference.parent.mkdir()
    for name in emoji_dataset.FILES:
        (reference.parent / f"{name}.parquet").write_bytes((path.parent / f"{name}.parquet").read_bytes())
    before = read_content(path)
    alpha = pq.read_table(path)["alpha"][0].as_py()["bytes"]
    pixels = np.array(Image.open(io.BytesIO(alpha)).convert("L"))
    change(path, "alpha.bytes", to_webp(pixels, lossless=True, method=0, quality=0))
    assert hashlib.sha256(path.read_bytes()).digest() != hashlib.sha256(reference.read_bytes()).digest()
    assert read_content(path) == before and run("check", str(path.parent)).exit_code == 0
    pixels[60, 60] += 3
    change(path, "alpha.bytes", to_webp(pixels, lossless=True))
    assert read_content(path).differing(before) == ["alpha"]
    refused = run("check", str(path.parent), "--reference", str(reference.parent))
    assert str(refused.exception).startswith("the rows are the same, but the pixels of alpha in train.parquet are not")
    assert "same rows, pixels within 3 levels" in refused.output
    found = compare(path, reference)
    assert found.same_rows and not found.same and found.most == {"image": 0, "alpha": 3}
    assert found.equal["alpha"] == found.rows[0] - 1 and found.mean["alpha"] > 0


def test_a_file_of_something_else_is_refused(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert "holds no train.parquet" in str(run("check", str(tmp_path / "out")).exception)
    pq.write_table(pa.table({"caption": ["a"]}), tmp_path / "out" / "train.parquet")
    assert "has other columns than image, alpha" in str(run("check", str(tmp_path / "out")).exception)
