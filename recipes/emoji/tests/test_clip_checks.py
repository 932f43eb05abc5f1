"""The questions of `clip-checks`, answered by a judge that knows what an image shows."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from arimage.eval import job as jobs
from arimage.eval.job import Job
from arimage.eval.metrics.features import Space
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.prompts import read_prompts
from arimage.eval.score import score
from arimage_emoji import EMOJI_CHECKS
from arimage_emoji.metrics.clip_checks import questions_of


SIZES = {
    "known": 10, "paraphrases": 10, "colours": 7, "coloured-objects": 10, "counts": 4, "counted-objects": 10,
    "pairs": 10,
}  # fmt: skip
# Prompts, what their images show, and how the questions are answered.
SHOWN = [
    ("a green heart", "a green heart", {"colours": True, "coloured-objects": True}),
    ("a blue book", "a red book", {"colours": False, "coloured-objects": True}),
    ("a blue square", "a blue leopard", {"colours": True, "coloured-objects": False}),
    ("two hamsas", "two hamsas", {"counts": True, "counted-objects": True}),
    ("three keyboards", "two keyboards", {"counts": False, "counted-objects": True}),
    ("two magnets", "two ducks", {"counts": True, "counted-objects": False}),
    ("a potato and a pencil", "a potato and a pencil", {"pairs": True}),
    ("a canned food and a goose", "a goose", {"pairs": False}),
    ("tent", "tent", {"known": True}),
    ("cloud with rain", "tent", {"known": False}),
    ("a car seen from the side", "a car seen from the side", {"paraphrases": True}),
]


@pytest.fixture(scope="module")
def rows():
    return {row["prompt"]: row for row in read_prompts(EMOJI_CHECKS.path)}


def test_each_prompt_stands_first_among_other_texts_of_one_changed_fact(rows):
    seen = set()
    for prompt, row in rows.items():
        for name, texts in questions_of(row).items():
            seen.add(name)
            assert texts[0] == prompt and len(set(texts)) == len(texts) == SIZES[name]
            if name in ("known", "paraphrases"):
                assert all(rows[text]["parts"] != row["parts"] for text in texts[1:])
    assert seen == set(SIZES)
    colours = questions_of(rows["a green heart"])
    assert all(text.endswith(" heart") for text in colours["colours"]) and "an orange heart" in colours["colours"]
    assert all("green " in text and "heart" not in text for text in colours["coloured-objects"][1:])
    counts = questions_of(rows["two hamsas"])
    assert counts["counts"] == ["two hamsas", "a hamsa", "three hamsas", "four hamsas"]
    assert all(text.startswith("two ") for text in counts["counted-objects"])
    pairs = questions_of(rows["a potato and a pencil"])["pairs"]
    assert [("a potato and " in text) + text.endswith(" and a pencil") for text in pairs] == [2] + [1] * 9


class Words:
    """Counts of the words of a text; an image of the colour (n, n, n) shows that of `SHOWN[n]`."""

    space = Space("words", "0", "none")

    def __init__(self, folder, device):
        self.places = {}

    def __call__(self, images):
        return self.of_texts([SHOWN[image.getpixel((0, 0))[0]][1] for image in images])

    def of_texts(self, texts):
        words = [[self.places.setdefault(word, len(self.places)) for word in text.split()] for text in texts]
        return torch.stack([F.one_hot(torch.tensor(one), 512).sum(0) for one in words]).float()


def test_a_run_is_scored_in_a_row_per_question(rows, write_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "ClipExtractor", Words)
    run = tmp_path / "run"
    images = np.arange(len(SHOWN), dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
    write_run(run, prompt_rows([rows[prompt] for prompt, _, _ in SHOWN], 0), images)
    found = score(Job(run), ["clip-checks"])
    assert found.pop("clip-checks")["value"] == 5 / 11
    assert set(found) == {f"clip-checks-{name}" for name in SIZES}
    for name, size in SIZES.items():
        entry, hits = found[f"clip-checks-{name}"], [answers[name] for _, _, answers in SHOWN if name in answers]
        assert (entry["value"], entry["count"]) == (np.mean(hits), len(hits))
        assert f"chance {1 / size:.3f}," in entry["reference"]


def test_a_run_without_checks_is_refused(write_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "ClipExtractor", Words)
    write_run(tmp_path / "run", prompt_rows([{"prompt": "a cat"}], 0), np.zeros((1, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="emoji-checks"):
        score(Job(tmp_path / "run"), ["clip-checks"])
