"""The data set of icons is built from the npm package by known rules, which say how many icons they left out."""

import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from arimage_icons import build as building
from arimage_icons.build import build
from arimage_icons.dataset.choose import LICENCES, Icon
from arimage_icons.dataset.split import near_copies, split_by_words


pytest.importorskip("resvg_py", reason="it draws the icons")
FILES = ["sets.json", "test.parquet", "train.parquet", "val.parquet"]
# Nine families, of which "ic" and "material-symbols" are one.
SEEN = ["bi", "carbon", "eva", "ic", "jam", "material-symbols", "oi", "ph", "tabler", "uil"]


def squares(cells: list[int]) -> str:
    """The shape of an icon: some of 36 squares of 4 units."""
    path = "".join(f"M{cell % 6 * 4} {cell // 6 * 4}h4v4h-4z" for cell in cells)
    return f'<path fill="currentColor" d="{path}"/>'


def design(seed: int) -> str:
    return squares(np.random.default_rng(seed).permutation(36)[:12].tolist())


def about(licence: str = "MIT", **more) -> dict:
    return {"name": "A set", "author": {"name": "Ada"}, "license": {"title": licence, "spdx": licence}, **more}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """An unpacked package in which each rule leaves something out."""
    icons = {name: {} for name in [*SEEN, "iconoir", "colours", "asked", "glyphs", "simple-icons", "unknown"]}
    for number, name in enumerate([*SEEN, "iconoir"]):
        icons[name] |= {"boat": design(number), "boat-filled": design(100 + number), "heart": design(200 + number)}
        icons[name]["heart-outline"] = design(1000 + number)
        icons[name]["arrow-left" if number % 3 else "left-arrow"] = design(300 + number)
        # Nine near copies of each other, of which three are equal to others, and two designs.
        icons[name]["twin"] = squares([*range(30), 30 + number % 6]) if number < 9 else design(400 + number)
        icons[name]["acme"] = design(500 + number)
        icons[name][f"boat-{'heart' if number % 2 else 'twin'}"] = design(2000 + number)
    for number, name in enumerate(["carbon", "ic", "jam", "material-symbols", "oi", "ph", "tabler", "uil"]):
        icons[name]["rare"] = design(600 + number)
    icons["bi"] |= {
        "boat-bold": squares([1, 2, 3, 4, 5, 7, 8, 9]),
        "boat-sharp": squares([1, 2, 3, 4, 5, 7, 8, 9, 10]),
        "boat-thin": design(0),
        "boat-solid": '<path d="M-9-9h48v48h-48z"/>',
        "boat-duotone": design(700),
        "outline-24": design(701),
        "boat-old": design(702),
    }
    icons["simple-icons"] |= {"acme": design(800), "heart": design(801)}
    for name in ("colours", "asked", "glyphs", "unknown"):
        icons[name]["boat"] = design(900)
    collections = {name: about() for name in icons if name != "unknown"}
    collections["colours"]["palette"] = True
    collections["asked"] = about("CC-BY-4.0")
    folder = tmp_path_factory.mktemp("npm") / "package"
    (folder / "json").mkdir(parents=True)
    (folder / "collections.json").write_text(json.dumps(collections))
    for name, shapes in icons.items():
        data = {"prefix": name, "width": 24, "height": 24, "icons": {key: {"body": it} for key, it in shapes.items()}}
        if name == "bi":
            data["icons"]["boat-old"]["hidden"] = True
        (folder / "json" / f"{name}.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def built(package, tmp_path_factory):
    """What the command writes and prints when it is given the file that npm writes."""
    folder = tmp_path_factory.mktemp("built")
    with tarfile.open(folder / "icons.tgz", "w:gz") as archive:
        archive.add(package, "package")
    command = [sys.executable, "-m", "arimage_icons.build", "--package", folder / "icons.tgz", "--out", folder / "out"]
    return folder / "out", subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rows(path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_every_rule_says_how_many_icons_it_left_out(built):
    out, printed = built
    counts = {
        reason: int(count)
        for count, _, reason in (line.strip().partition(" ") for line in printed.splitlines()[1:-1])
        if count.isdecimal()
    }
    kept = {reason.split()[2]: counts.pop(reason) for reason in list(counts) if reason.startswith("rows of ")}
    assert counts == {
        "in sets with colours": 1,
        "with the licence CC-BY-4.0": 1,
        "in sets with parts in grey": 1,
        "in sets of logos and currencies": 2,
        "in sets without a licence": 1,
        "hidden by their sets": 1,
        "in two tones": 1,
        "without a word of what they show": 1,
        "named as a brand or a currency": 11,
        "of what fewer than 8 families drew": 19,
        "with more than 75% ink": 1,
        "with a picture that another one has": 4,
        "that are near copies": 6,
        "of what fewer than 8 designs are left": 3,
    }
    assert kept == {f"{name}.parquet,": len(rows(out / f"{name}.parquet")) for name in ("train", "val", "test")}
    assert sum(counts.values()) + sum(kept.values()) == int(printed.split()[0])


def test_rows_have_captions_splits_labels_and_pictures(built):
    out, _ = built
    train, val, test = (rows(out / f"{name}.parquet") for name in ("train", "val", "test"))
    # No word of style, one order of words, and no concept that too few drew.
    assert {row["caption"] for row in train} == {"arrow left", "boat", "heart"}
    assert {(row["set"], row["split"]) for row in test} == {("iconoir", "test")}
    assert Counter(row["name"] for row in test) == Counter(
        ["boat", "boat-filled", "heart", "heart-outline", "arrow-left"]
    )
    assert {row["split"] for row in train + val} == {"train"} and "iconoir" not in {row["set"] for row in train + val}
    labels = {row["caption"]: row["label"] for row in train + val + test}
    assert labels == {"arrow left": 0, "boat": 1, "heart": 2}
    assert {row["family"] for row in train if row["set"] in ("ic", "material-symbols")} == {"google"}
    assert not {(row["set"], row["name"]) for row in train + val} & {("bi", "boat-sharp"), ("bi", "boat-thin")}
    keys = [(row["set"], row["name"]) for row in train]
    assert keys == sorted(keys) and len(keys) == 50 and len(val) == 1
    for row in train + val + test:
        pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
        assert pixels.shape == (64, 64) and pixels.dtype == np.uint8 and row["licence"] == "MIT"
    sets = json.loads((out / "sets.json").read_text())
    assert sets["iconoir"] == ["MIT", 0, 5] and sum(count for _, count, _ in sets.values()) == len(train)


def test_a_folder_gives_the_same_files_and_a_failure_leaves_the_old_ones(
    built, package, tmp_path, monkeypatch, capsys
):
    out, printed = built
    build(package, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert capsys.readouterr().out == printed and "trained on other rows of train, val, test" in printed
    assert all((tmp_path / name).read_bytes() == (out / name).read_bytes() for name in FILES)
    (tmp_path / "train.parquet").write_text("old")

    def interrupted(table, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(building.pq, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(package, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert (tmp_path / "train.parquet").read_text() == "old"


def test_the_data_set_of_words_has_all_of_the_other_one_which_stays_as_it_is(built, package, tmp_path, capsys):
    out, printed = built
    build(package, tmp_path, words=True)
    assert all((tmp_path / name).read_bytes() == (out / name).read_bytes() for name in FILES)
    report = capsys.readouterr().out
    assert report.startswith(printed)
    total, *left_out = [int(line.split()[0]) for line in report[len(printed) :].splitlines()[:-5]]
    words = {path.stem: rows(path) for path in (tmp_path / "words").glob("*.parquet")}
    assert words.keys() == {"train", "val", "test", "compositions"}
    assert total == sum(left_out) + sum(map(len, words.values()))
    keys = {name: {(row["set"], row["name"]) for row in its} for name, its in words.items()}
    for name in ("train", "val", "test"):
        assert {(row["set"], row["name"]) for row in rows(out / f"{name}.parquet")} <= keys[name]
    # What too few families have of a name, and many of its words.
    assert {row["caption"] for row in words["train"]} > {"arrow left", "boat", "heart"}
    assert not any(keys["train"] & keys[name] for name in ("val", "test", "compositions"))


def test_training_has_the_words_of_held_out_compositions_but_never_together():
    words = ["cloud", "lock", "user", "plus", "file", "heart", "home", "star"]
    pairs = [f"{one} {other}" for one, other in combinations(words, 2)]
    captions = [*pairs, *reversed(pairs), *(f"{pair} circle" for pair in pairs), "cloud cloud", "sun"]
    icons = [
        Icon(caption, name, f"{caption} {number}", "test" if name == "iconoir" else "train", "MIT", name)
        for number, caption in enumerate(captions)
        for name in ("bi", "carbon", "eva", "iconoir", "oi")
    ]
    pixels = np.random.default_rng(0).choice([0, 255], (len(icons), 4, 16)).astype(np.uint8)
    val, left_out = {icons[0]}, Counter()
    parts, labels = split_by_words(icons, pixels, val, {"cloud lock", "sun"}, left_out)
    of = {name: [icons[number] for number in numbers] for name, numbers in parts.items()}
    (composition,) = {icon.caption for icon in of["compositions"]}
    assert composition in pairs and composition != "cloud lock" and len(of["compositions"]) == 10
    both = set(composition.split())
    assert not any(both <= set(icon.caption.split()) for icon in of["train"])
    assert all(sum(word in icon.caption.split() for icon in of["train"]) > 20 for word in both)
    assert {icon.split for icon in of["train"]} == {"train"} and {icon.set for icon in of["test"]} == {"iconoir"}
    assert of["val"] == [icons[0]] and left_out["whose captions have both words of a composition and others"] == 4
    assert sum(left_out.values()) + sum(map(len, of.values())) == len(icons)
    assert sorted(labels) == list(labels) and labels.keys() == {icon.caption for its in of.values() for icon in its}


def test_a_near_copy_is_one_of_a_picture_that_is_kept():
    pixels = np.full((4, 1, 40), 255, np.uint8)
    for number, start in enumerate((0, 2, 4, 20)):
        pixels[number, 0, start : start + 30] = 0
    # Neighbours share 28 of 32 pixels, the first and the third 26 of 34.
    assert near_copies(pixels).tolist() == [False, True, False, False]
    # 17 of 20 is no more than 0.85, however it is rounded.
    pixels = np.full((2, 1, 20), 255, np.uint8)
    pixels[0], pixels[1, 0, :17] = 0, 0
    assert not near_copies(pixels).any()


@pytest.mark.parametrize("kind", ["nothing", "a cut file", "another folder", "a set that is cut"])
def test_what_is_no_package_is_refused_in_a_sentence(kind, built, tmp_path):
    package = tmp_path / "given"
    if kind == "a cut file":
        package.write_bytes((built[0].parent / "icons.tgz").read_bytes()[:200])
    elif kind != "nothing":
        package.mkdir()
    if kind == "a set that is cut":
        (package / "json").mkdir()
        (package / "collections.json").write_text("{}")
        (package / "json" / "bi.json").write_text('{"prefix": "b')
    with pytest.raises(ValueError, match=r"package of icons.*give the file that `npm pack @iconify/json@2\.2\.535`"):
        build(package, tmp_path / "out")


def test_the_notice_names_each_set_that_is_trained_on(built, package):
    out, _ = built
    command = [sys.executable, "-m", "arimage_icons.notice", "--package", package, "--data"]
    printed = subprocess.run([*command, out], check=True, capture_output=True, text=True).stdout
    assert printed.count("A set (") == len(SEEN) and "iconoir" not in printed
    assert "  Ada\n  MIT (SPDX: MIT)\n" in printed
    refused = subprocess.run([*command, out / "nothing"], capture_output=True, text=True)
    assert refused.returncode == 2 and "sets.json" in refused.stderr


def test_the_text_of_each_licence_that_asks_for_it_lies_next_to_the_notice():
    recipe = Path(__file__).parents[1]
    notice = (recipe / "NOTICE").read_text("utf-8")
    counts = [int(count.replace(",", "")) for count in re.findall(r"^\S.*\), ([\d,]+) icons$", notice, re.MULTILINE)]
    assert (len(counts), sum(counts)) == (94, 29522)
    licences = set(re.findall(r"SPDX: ([\w.-]+)\)", notice))
    texts = {path.stem for path in recipe.glob("licenses/*.txt")}
    # The last two ask for nothing, and the first is that of the recipe.
    assert licences == LICENCES == texts | {"Apache-2.0", "CC0-1.0", "Unlicense"}
