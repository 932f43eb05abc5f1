"""The passes of InfinityStar next to the authors' (tiny random weights in the published format): schedules, logits,
guidance, bits and latents of images and of a film."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from arimage.convert.checkpoint import CheckpointError
from arimage.convert.folder import load_original_folder
from arimage.pipelines.infinitystar.convert import infinitystar_transformer_from_original
from arimage.pipelines.infinitystar.guidance import projected_guidance
from arimage.pipelines.infinitystar.pyramid import bit_vectors, bits_of, enlarge, reduce
from arimage.pipelines.infinitystar.schedules import COUNTS, SCHEDULES, clip_lengths, passes
from arimage.pipelines.infinitystar.transformer_infinitystar import cell_positions, text_positions


FIXTURES = Path(__file__).parent / "fixtures"
CONFIG = json.loads((FIXTURES / "config.json").read_text())
GRIDS = json.loads((FIXTURES / "schedules.json").read_text())


@pytest.fixture(scope="module")
def expected():
    return load_file(FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def transformer():
    return infinitystar_transformer_from_original(load_original_folder(FIXTURES / "weights"))


def schedule(run):
    return passes(
        SCHEDULES["0.06M", finest(run)],
        1 + (run["num_frames"] - 1) // 4,
        bits=(4, 16),
        semantic_grids=CONFIG["semantic_scales"],
        image_repetitions=tuple(CONFIG["image_scale_repetition"]),
        clip_repetitions=tuple(CONFIG["video_scale_repetition"]),
    )


def finest(run):
    return run["height"] // 16, run["width"] // 16


def guide(logits, run, one):
    scale, temperature = run.get("cfg", 34), run.get("tau_video", 0.4) if one.clip else run.get("tau_image", 1.0)
    if len(logits) == 1:
        return logits / temperature
    if run.get("apg", True):
        return projected_guidance(logits, scale, temperature, CONFIG["apg_norm_threshold"])
    conditional, unconditional = logits / temperature
    return (scale * conditional + (1 - scale) * unconditional)[None]


@pytest.mark.parametrize("ratio", GRIDS)
def test_grids_are_those_of_the_original(ratio):
    grids = tuple(map(tuple, GRIDS[ratio]["grids"]))
    for pixels, (height, width) in GRIDS[ratio]["pixels"].items():
        assert SCHEDULES[pixels, (height // 16, width // 16)] == grids[: COUNTS[pixels]]


@pytest.mark.parametrize("name", CONFIG["runs"])
def test_passes_are_those_of_the_original(name):
    run = CONFIG["runs"][name]
    found = [[one.clip * COUNTS["0.06M"] + one.grid, *one.shape, one.bits] for one in schedule(run)]
    assert found == run["passes"]


def test_the_published_films_have_the_published_passes():
    grids = SCHEDULES["0.40M", (30, 53)]
    own = {"bits": (16, 64), "semantic_grids": 11, "image_repetitions": (3,) * 14}
    film = passes(grids, 21, **own, clip_repetitions=(3,) * 12 + (2, 1))
    assert len(film) == 81 and sum(one.last for one in film) == 2
    assert sum(math.prod(one.shape) for one in film) == 161_397
    assert len(passes(grids, 41, **own, clip_repetitions=(3,) * 12 + (2, 1))) == 120
    assert clip_lengths(1) == [1] and clip_lengths(13) == [1, 12] and clip_lengths(41) == [1, 20, 20]
    for frames in (0, 3, 29):
        with pytest.raises(ValueError, match=f"a film has {frames} latent frames"):
            clip_lengths(frames)


@pytest.mark.parametrize("name", CONFIG["runs"])
@torch.no_grad()
def test_logits_bits_and_latents_equal_the_originals(transformer, expected, name):
    run, config = CONFIG["runs"][name], transformer.config
    embeds = expected[f"{name}.prompt_embeds"]
    length = embeds.shape[1]
    null = transformer.null_embedding[None, :length]
    negative = [] if run.get("cfg") == 1 else [expected.get(f"{name}.negative_prompt_embeds", null)]
    _, text = transformer(torch.cat([embeds, *negative]), text_positions(length, embeds.device), text=True)
    schedule_of_run, branches = schedule(run), 1 + len(negative)
    latents = torch.zeros_like(expected[f"{name}.latents"])
    past, found = (text,), []
    for number, one in enumerate(schedule_of_run):
        clip = latents[:, :, one.first : one.first + one.shape[0]]
        inputs = reduce(clip, one.shape[1:]).movedim(1, -1).flatten(1, 3).repeat(branches, 1, 1)
        positions = cell_positions(number, one, finest(run), inputs.device)
        logits, memory = transformer(inputs, positions, coarse=one.bits == config.bits[0], past=past)
        guided = guide(logits.flatten(1, 2)[:, None], run, one)
        for kind, ours in (("cond", logits[0]), ("uncond", logits[-1]), ("guided", guided[0, 0])):
            theirs = expected.get(f"{name}.logits_{kind}_{number}")
            if theirs is not None:
                torch.testing.assert_close(ours.reshape(theirs.shape), theirs, atol=1e-4, rtol=0)
        bits = guided[0].argmax(-1).unflatten(1, (*one.shape, one.bits))
        found.append(bits.flatten())
        clip += enlarge(bit_vectors(bits), (config.latent_channels, *finest(run)))
        if one.last:
            past = (memory, text)
    packed = np.packbits(torch.cat(found).numpy().astype(np.uint8))
    assert (packed == expected[f"{name}.bits"].numpy()).all()
    torch.testing.assert_close(latents, expected[f"{name}.latents"], atol=1e-5, rtol=0)


def test_the_bits_of_latents_approach_them():
    latents = torch.randn(2, 16, 3, 12, 21, generator=torch.Generator().manual_seed(0)) / 4
    left = latents.clone()
    sizes = [left.square().mean()]
    for _ in range(3):
        left -= enlarge(bit_vectors(bits_of(left, 16, (12, 21))), (16, 12, 21))
        sizes.append(left.square().mean())
    assert all(after < before for before, after in pairwise(sizes[:2]))
    assert torch.equal(
        bits_of(bit_vectors(bits_of(latents, 16, (12, 21))), 16, (12, 21)), bits_of(latents, 16, (12, 21))
    )


def test_films_of_a_batch_are_guided_alone():
    logits = torch.randn(2, 3, 40, 2, generator=torch.Generator().manual_seed(1))
    together = projected_guidance(logits, 34.0, 0.4, 0.05)
    for film in range(3):
        alone = projected_guidance(logits[:, film : film + 1], 34.0, 0.4, 0.05)
        torch.testing.assert_close(together[:, film : film + 1], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("key", ["cfg_uncond", "semantic_head2.bias", "norm_hidden_sates.weight"])
def test_missing_tensors_are_refused_by_name(key):
    state = load_original_folder(FIXTURES / "weights")
    del state[key]
    with pytest.raises(CheckpointError, match=f"has no '{key}'"):
        infinitystar_transformer_from_original(state)
