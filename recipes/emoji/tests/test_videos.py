"""Scores of videos: those of true animations are near 1, those of wrong ones near 0."""

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from arimage.eval.job import Job
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.prompts import prompt_file, read_prompts
from arimage.eval.score import score
from arimage_emoji.data.animation import animate, is_held_out, poses
from arimage_emoji.data.scenes import on_ground
from arimage_emoji.metrics.composition import foreground
from arimage_emoji.metrics.motions import CAST, COMBINATIONS, MOTIONS, motions_in, phrases
from arimage_emoji.metrics.reference import read_gallery
from arimage_emoji.metrics.videos import ObjectTrack, check_video, gallery_pictures


SIDE, FRAMES = 64, 8


@pytest.fixture(scope="module")
def gallery():
    return read_gallery()


@pytest.fixture(scope="module")
def pictures(gallery):
    return gallery_pictures(gallery[0])


@pytest.fixture(scope="module")
def sprite(gallery):
    """A function from a name to the image and the alpha of its picture."""

    def sprite(name):
        picture = gallery[0][gallery[1].index(name)]
        image = F.interpolate(picture[None], size=(SIDE, SIDE), mode="bilinear")[0].mul(255).round().byte()
        return image, foreground(image[None]).byte() * 255

    return sprite


@pytest.fixture(scope="module")
def film(sprite):
    return lambda name, *motions: animate(*sprite(name), poses(motions, FRAMES))[0]


@pytest.fixture(scope="module")
def cases():
    """Objects with motions, every one of these."""
    return list(zip(random.Random(1).sample(CAST, len(COMBINATIONS)), COMBINATIONS, strict=True))


# Words


def test_motions_are_read_from_captions():
    for motions in COMBINATIONS:
        for text in phrases(motions):
            assert motions_in(f"a red heart, {text}") == motions
            assert motions_in(f"A red heart on a white background {text.upper()}") == motions
    assert motions_in("a spinning top") == ("spinning",) and motions_in("a rose") == ()


def test_the_prompts_ask_for_known_objects_and_motions(gallery):
    rows = read_prompts(prompt_file("emoji-videos"))
    assert len(rows) == len({row["prompt"] for row in rows}) == 1000
    for row in rows:
        assert row["name"] in gallery[1] and motions_in(row["prompt"])
        assert row["held_out"] == is_held_out(row["name"], motions_in(row["prompt"]))
    held_out = {(row["name"], motions_in(row["prompt"])) for row in rows if row["held_out"]}
    assert held_out == {(name, motions) for name in CAST for motions in COMBINATIONS if is_held_out(name, motions)}


# Measures


@pytest.mark.slow
def test_true_animations_score_near_one_and_wrong_ones_near_zero(film, cases, pictures, gallery):
    true, wrong = [], []
    for i, (name, motions) in enumerate(cases):
        frames = film(name, *motions)
        prompt = f"{name}, {phrases(motions)[0]}"
        true.append(check_video(frames, prompt, name, pictures, gallery[1]))
        other_name, other_motions = cases[i - 1]
        other = f"{other_name}, {phrases(other_motions)[0]}"
        wrong.append(check_video(frames, other, other_name, pictures, gallery[1]))
    mean = {name: np.mean([one[name] for one in true]) for name in true[0]}
    assert mean["video-retrieval"] > 0.95 and mean["video-motion"] > 0.9
    assert mean["video-change"] < 0.04 and mean["video-collapse"] == 0
    assert np.mean([one["video-retrieval"] for one in wrong]) < 0.05
    assert np.mean([one["video-motion"] for one in wrong]) < 0.05


@pytest.mark.parametrize("motion", MOTIONS)
def test_each_motion_is_told_on_coloured_grounds(sprite, motion):
    image, alpha = sprite("automobile")
    frames, alphas = animate(image, alpha, poses((motion,), FRAMES))
    assert ObjectTrack(on_ground(frames, alphas, "light blue")).motions() == {motion}


def test_what_stands_still_or_jumps_about_does_not_move(film):
    frames = film("robot", "right")
    assert ObjectTrack(frames[:1].repeat(FRAMES, 1, 1, 1)).motions() == set()
    assert ObjectTrack(frames[[4, 0, 7, 1, 6, 2, 5, 3]]).motions() == set()
    assert ObjectTrack(frames.flip(0)).motions() == {"left"}


def test_a_video_that_does_not_hold_together_collapses(film, sprite):
    heart, robot = film("red heart", "right"), film("robot", "right")
    gone, full = heart.clone(), heart.clone()
    gone[6:] = 255
    full[7] = torch.randint(256, full[7].shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    other = torch.cat([heart[:4], robot[4:]])
    for frames in (gone, full, other):
        assert ObjectTrack(frames).collapsed()
    assert not ObjectTrack(heart).collapsed() and ObjectTrack(gone).motions() == set()
    assert ObjectTrack(other).change() > 3 * ObjectTrack(heart).change()


# Runs


def test_a_run_of_videos_is_scored(film, write_run, tmp_path):
    asked = [
        {"prompt": "a red heart, moving right", "name": "red heart"},
        {"prompt": "a robot, growing", "name": "robot"},
        {"prompt": "a robot, spinning", "name": "robot"},
    ]
    shown = [film("red heart", "right"), film("robot", "growing"), film("red heart", "left")]
    write_run(tmp_path, prompt_rows(asked, 0), [frames.movedim(1, -1).numpy() for frames in shown])
    found = score(Job(tmp_path), ["videos"])
    assert found["video-motion"]["value"] == pytest.approx(2 / 3) == found["video-retrieval"]["value"]
    assert found["video-collapse"]["value"] == 0 and found["video-change"]["count"] == 3
    assert json.loads((tmp_path / "scores" / "video-motion.json").read_text())["values"] == [1, 1, 0]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("row", "frames", "message"),
    [
        ({"prompt": "a red heart", "name": "red heart"}, 8, "emoji-videos"),
        ({"prompt": "a blob, growing", "name": "blob"}, 8, "emoji-videos"),
        ({"prompt": "a red heart, growing", "name": "red heart"}, 1, "is an image"),
    ],
)
def test_runs_without_what_is_measured_are_refused(film, write_run, tmp_path, row, frames, message):
    shown = film("red heart", "growing")[:frames].movedim(1, -1).numpy()
    write_run(tmp_path, prompt_rows([row], 0), [shown if frames > 1 else shown[0]])
    with pytest.raises(ValueError, match=message):
        score(Job(tmp_path), ["videos"])
