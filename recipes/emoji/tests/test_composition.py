"""Pictures made from the sprites themselves pass the checks, and those of other prompts fail them."""

from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from arimage.eval.job import Job
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.prompts import prompt_file, read_prompts
from arimage.eval.score import score
from arimage_emoji import EMOJI_CHECKS, REFERENCE
from arimage_emoji.metrics.colours import COLOURS, colour_shares, main_hues, recolour
from arimage_emoji.metrics.composition import Judge, check_image, connected_parts, foreground
from arimage_emoji.metrics.reference import read_gallery


SIDE = 64
CHECKS = ("known", "paraphrases", "colours", "counts", "pairs")
RGB = {
    "red": (220, 30, 30), "orange": (245, 130, 20), "yellow": (250, 210, 30), "green": (40, 160, 60),
    "blue": (40, 90, 220), "purple": (140, 50, 190), "pink": (240, 120, 190),
}  # fmt: skip


@pytest.fixture(scope="module")
def gallery():
    return read_gallery()


@pytest.fixture(scope="module")
def judge(gallery):
    return Judge(*gallery)


@pytest.fixture(scope="module")
def rows():
    return read_prompts(EMOJI_CHECKS.path)


def place(pictures, size):
    """Up to four pictures uint8 [3, 32, 32] on white, `size` pixels large, in the corners of 64 x 64."""
    canvas = Image.new("RGB", (SIDE, SIDE), "white")
    for k, picture in enumerate(pictures):
        tile = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BICUBIC)
        across, down = divmod(k, 2)
        offset = (SIDE // 2 - size) // 2 if len(pictures) > 1 else 0
        canvas.paste(tile, (across * SIDE // 2 + offset, down * SIDE // 2 + offset))
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1)


def picture_of(row, gallery):
    """What the prompt of a check asks for, from the gallery's pictures."""
    tiles, names = gallery
    chosen = [(tiles[names.index(one[0])] * 255).round().byte() for one in row["parts"]]
    if "colour" in row:
        one = chosen[0][None]
        chosen = list(recolour(one, main_hues(one, foreground(one))[0], row["colour"]))
    return place(chosen, SIDE if len(chosen) == 1 else 28)


@pytest.fixture(scope="module")
def pictures(rows, gallery):
    """A function from the index of a prompt to its picture."""
    return cache(lambda i: picture_of(rows[i], gallery))


def disc(colour, centres, radius=10, ground=(255, 255, 255)):
    y, x = np.mgrid[:SIDE, :SIDE]
    image = np.full((SIDE, SIDE, 3), ground, np.uint8)
    for cx, cy in centres:
        image[(x - cx) ** 2 + (y - cy) ** 2 <= radius**2] = colour
    return torch.from_numpy(image).permute(2, 0, 1)


def test_the_file_holds_enough_prompts_of_each_check(rows, gallery):
    counts = {check: sum(row["check"] == check for row in rows) for check in CHECKS}
    assert sum(counts.values()) == len(rows)
    assert counts["known"] == 400 and min(counts.values()) >= 60
    assert len({row["prompt"].lower() for row in rows}) == len(rows)
    names = set(gallery[1])
    for row in rows:
        assert all(set(part) & names for part in row["parts"]), row
        assert ("colour" in row) == (row["check"] == "colours")
    assert prompt_file("emoji-checks") == EMOJI_CHECKS.path and EMOJI_CHECKS.path.parent == REFERENCE


@pytest.mark.parametrize("colour", COLOURS)
def test_a_colour_is_told_on_any_ground(judge, colour):
    for ground in ((255, 255, 255), (128, 128, 128)):
        image = disc(RGB[colour], [(32, 32)], ground=ground)
        assert [other for other in COLOURS if judge.colour(image, other)] == [colour]


@pytest.mark.parametrize("colour", COLOURS)
def test_recolouring_gives_the_colour_and_leaves_the_rest(colour):
    image = disc(RGB["red"], [(32, 40)], radius=18)
    image[:, 2:16, 30:34] = torch.tensor([60, 140, 40]).view(3, 1, 1)
    mask = foreground(image[None])
    hues, shares = main_hues(image[None], mask)
    assert 0.7 < shares[0] < 1
    found = recolour(image[None], hues, colour)
    share = colour_shares(found, mask)[0]
    assert list(COLOURS)[share.argmax()] == colour and share.max() > 0.9
    assert torch.equal(found[0, :, 2:16, 30:34], image[:, 2:16, 30:34])
    assert torch.equal(found[0][:, ~mask[0]], image[:, ~mask[0]])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_parts_are_counted_and_specks_are_not(count):
    image = disc((30, 30, 200), [(14, 14), (48, 14), (14, 48), (48, 48)][:count])
    image[:, 31, 31] = 0
    parts = connected_parts(foreground(image[None])[0])
    assert len(parts) == count
    assert all(abs(int(part.sum()) - 317) < 3 for part in parts)


@pytest.mark.slow
def test_made_pictures_pass_and_shuffled_ones_fail(judge, rows, pictures):
    for check in CHECKS:
        index = [i for i, row in enumerate(rows) if row["check"] == check]
        # Neighbours may ask for the same picture.
        index = index[:: len(index) // 8][:8]
        right = [all(check_image(judge, pictures(i), rows[i]).values()) for i in index]
        moved = [
            all(check_image(judge, pictures(i), rows[j]).values())
            for i, j in zip(index, index[1:] + index[:1], strict=True)
        ]
        assert np.mean(right) >= 0.9, check
        assert np.mean(moved) <= 0.05, check


def test_a_wrong_number_colour_or_object_is_told_apart(judge, rows, gallery):
    row = next(row for row in rows if row["check"] == "counts" and len(row["parts"]) == 3)
    two = picture_of(row | {"parts": row["parts"][:2]}, gallery)
    assert check_image(judge, two, row) == {"counts-parts": False, "counts": False}
    pair = next(row for row in rows if row["check"] == "pairs")
    twice = picture_of(pair | {"parts": pair["parts"][:1] * 2}, gallery)
    assert check_image(judge, twice, pair) == {"pairs-parts": True, "pairs": False}
    coloured = [row for row in rows if row["check"] == "colours"]
    one = coloured[0]
    other = next(row for row in coloured if row["colour"] == one["colour"] and row["noun"] != one["noun"])
    outcome = check_image(judge, picture_of(other, gallery), one)
    assert outcome == {"colours": True, "coloured-objects": False}


def test_a_run_is_scored_in_a_row_per_check(rows, pictures, write_run, tmp_path):
    chosen = [next(i for i, row in enumerate(rows) if row["check"] == check) for check in CHECKS]
    chosen += [i for i, row in enumerate(rows) if row["check"] == "known"][1:4]
    asked = [rows[i] for i in chosen]
    shown = [pictures(i) for i in chosen[:6]] + [torch.full((3, SIDE, SIDE), 255, dtype=torch.uint8)] * 2
    run = tmp_path / "run"
    write_run(run, prompt_rows(asked, 0), [image.permute(1, 2, 0).numpy() for image in shown])
    found = score(Job(run), ["checks"])
    assert {name: (one["value"], one["count"]) for name, one in found.items()} == {
        "known": (0.5, 4), "paraphrases": (1, 1), "colours": (1, 1), "coloured-objects": (1, 1),
        "counts-parts": (1, 1), "counts": (1, 1), "pairs-parts": (1, 1), "pairs": (1, 1),
    }  # fmt: skip
