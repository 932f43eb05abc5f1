"""The packaged models invent: what they generate follows the prompt, and no two seeds give one picture."""

import pytest
import torch

from arimage import AutoPipeline
from arimage_icons import JUDGE, MODELS
from arimage_icons.judge_network import IconJudge, concepts_of, verdicts


@pytest.fixture(scope="module", params=["icons-arpg", "icons-llamagen"])
def pipe(request):
    pipe = AutoPipeline.from_pretrained(MODELS / request.param)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_packaged_weights_are_small():
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= 37e6


def test_seeds_give_different_icons_of_what_is_asked_in_few_exact_passes(pipe):
    generator = torch.Generator().manual_seed(0)
    output = pipe(
        ["a filled heart", "an outlined heart"], num_images_per_prompt=3, generator=generator, output_type="pt"
    )
    assert output.images.shape == (6, 3, 64, 64) and output.stats.exact and output.stats.forward_passes <= 60
    ink = 1 - output.images.mean(1)
    middle = ink.view(2, 3, 64, 64)[:, :, 24:36, 28:36].mean((2, 3))
    assert middle[0].min() > 0.8 and middle[1].max() < 0.2
    # Paper has no grain.
    assert (ink == 0).float().mean() > 0.5
    apart = torch.pdist(ink[3:].flatten(1), p=1) / ink[0].numel()
    assert apart.min() > 0.02 and all(len(torch.unique(it)) > 1 for it in ink)


def test_words_that_it_does_not_know_are_said_with_the_nearest_names(pipe):
    assert pipe.known_captions.knows("a thin house") and pipe.known_captions.knows("camera icon")
    unknown = pipe.known_captions.check("a red cameraa", "icons-arpg")
    assert unknown is not None and "camera" in unknown.nearest


def test_a_masked_model_invents_what_is_asked_in_few_passes():
    pipe = AutoPipeline.from_pretrained(MODELS / "icons-maskgit")
    pipe.set_progress_bar_config(disable=True)
    assert sum(path.stat().st_size for path in (MODELS / "icons-maskgit").rglob("*") if path.is_file()) <= 10e6
    names, judge = ["calendar", "database", "gift", "trophy"], IconJudge.from_pretrained(JUDGE).eval()
    given = {"generator": torch.Generator().manual_seed(0), "output_type": "pt"}
    output = pipe(names, num_images_per_prompt=2, decoding="halton:steps=16", **given)
    assert output.stats.exact and output.stats.forward_passes == 16
    grey = output.images.mean(1)
    asked = [name for name in concepts_of(names, judge.config.concepts) for _ in range(2)]
    assert verdicts(judge, 255 * grey, asked).any(1).float().mean() >= 0.5
    assert all((one - other).abs().mean() > 0.02 for one, other in grey.unflatten(0, (4, 2)))


def test_the_judge_knows_signs_that_it_never_saw():
    down, across = torch.meshgrid(torch.arange(64) - 31.5, torch.arange(64) - 31.5, indexing="ij")
    beam, lines = down.abs() < 3, (down.abs() < 3) | ((down.abs() - 16).abs() < 3)
    ink = [
        ((down**2 + across**2).sqrt() - 24).abs() < 2.5,
        (beam & (across.abs() < 22)) | (beam.T & (down.abs() < 22)),
        lines & (across.abs() < 24),
    ]
    judge = IconJudge.from_pretrained(JUDGE).eval()
    names = concepts_of(["a circle", "a bold plus", "menu icon"], judge.config.concepts)
    assert verdicts(judge, 255 * (1 - torch.stack(ink).float()), names)[:, 0].all()
    assert sum(path.stat().st_size for path in JUDGE.iterdir()) < 3e6
