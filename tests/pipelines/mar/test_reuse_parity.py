"""ReCAP and LazyMAR agree with the programs of their authors: schedules, whole generations, evaluated rows."""

import json
from types import SimpleNamespace

import pytest
import torch
from pipelines.mar.tiny import FOLDER
from safetensors.torch import load_file

from arimage.convert import convert_mar
from arimage.decoding import LatentSampling, LazyMAR, ReCAP
from arimage.decoding.masked import latents
from arimage.decoding.masked.lazy_mar import FRACTIONS
from arimage.decoding.masked.sets import groups_of, masked_counts
from arimage.models.denoising_head import DenoisingHead
from arimage.pipelines.mar.context import LayerCache
from arimage.pipelines.mar.transformer_mar import MARLatentModel, MARTransformer


SMALL = {"token_dim": 2, "grid_size": 1, "num_layers": 1, "num_decoder_layers": 1}
SMALL |= {"hidden_size": 3, "num_attention_heads": 1, "decoder_hidden_size": 3, "num_decoder_attention_heads": 1}
CONFIG = json.loads((FOLDER / "recap.json").read_text())


@pytest.fixture(scope="module")
def expected():
    return load_file(FOLDER / "recap.safetensors") | load_file(FOLDER / "lazy_mar.safetensors")


@pytest.fixture(scope="module")
def pipes():
    files = {"recap": ("checkpoint-last.pth", 3), "lazy": ("lazy_mar_weights.safetensors", 2)}
    return {
        name: convert_mar(FOLDER / file, FOLDER / "kl16.ckpt", num_heads=heads)
        for name, (file, heads) in files.items()
    }


@pytest.fixture
def given_numbers(monkeypatch, expected):
    """Orders and noise are those of the authors' run."""

    def give(method):
        noise = expected[f"{method}_noise"].float()

        def normals(seeds, positions, steps, purpose, count):
            return noise[:, :, int(steps[0])].gather(1, positions[..., None].expand(-1, -1, count))

        monkeypatch.setattr(latents, "normals", normals)
        monkeypatch.setattr(latents, "random_orders", lambda seeds, count: expected[f"{method}_orders"])

    return give


def numbers(steps):
    return steps[0] if len(steps) == 1 else tuple(steps)


def generate(pipe, labels, one, decoding, **options):
    settings = {"guidance_scale": one["cfg"], "guidance_schedule": one["schedule"], "temperature": one["temperature"]}
    return pipe(class_labels=labels, decoding=decoding, output_type="latent", **settings, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize("one", CONFIG["recap"], ids=lambda one: one["name"])
def test_a_generation_by_recap(pipes, expected, given_numbers, one, monkeypatch):
    given_numbers("recap")
    scales, guidance_at = [], LatentSampling.guidance_at

    def noted(self, share):
        scales.append(guidance_at(self, share)[0].item())
        return guidance_at(self, share)

    monkeypatch.setattr(LatentSampling, "guidance_at", noted)
    decoding = ReCAP(
        one["T"], one["p"], one["u"], numbers(one["denoising"]), numbers(one["partial"]), keep_buffers=one["keep"]
    )
    out = generate(pipes["recap"], expected["recap_class_labels"], one, decoding)
    wanted, table = expected[f"recap_{one['name']}_latent"], expected[f"recap_{one['name']}_table"]
    # Values of 10^5 where an untrained head begins at the last step of training.
    torch.testing.assert_close(out.images, wanted, atol=1e-4 * max(1, float(wanted.abs().max())), rtol=0)
    assert out.stats.accepted.tolist() == [[count, count] for count in table[:, 2].tolist()]
    assert out.stats.head_calls == table[:, 5].sum() and not out.stats.exact
    torch.testing.assert_close(torch.tensor(scales), expected[f"recap_{one['name']}_cfg"], atol=1e-5, rtol=0)


def test_the_schedules_of_recap(expected):
    for name, table in expected.items():
        if not name.startswith("recap_table_"):
            continue
        tokens, steps, full, partial = map(int, name.split("_")[2:])
        counts, rows = masked_counts(tokens, steps), []
        for group in groups_of(steps, full, partial):
            size = counts[group.start] - counts[group.stop]
            for step in group:
                kind = 2 if step > group.start else int(len(group) > 1)
                left = counts[step + 1]
                rows.append([kind, group.start, counts[step] - left, left, size, tokens - left])
        assert rows == table.tolist(), name


@pytest.mark.parametrize(
    "one",
    [one if one["T"] < 64 else pytest.param(one, marks=pytest.mark.slow) for one in CONFIG["lazy"]],
    ids=lambda one: one["name"],
)
def test_a_generation_by_lazy_mar(pipes, expected, given_numbers, one, monkeypatch):
    given_numbers("lazy")
    rows, write_at = [], LayerCache.write_at

    def watched(self, slots, attended):
        # The encoder's cache never has all tokens.
        if attended == 320:
            rows.append(torch.zeros(2, 321).scatter(1, slots, 1)[:, :320])
        else:
            encoded.append(slots.shape[1])
        write_at(self, slots, attended)

    encoded = []
    monkeypatch.setattr(LayerCache, "write_at", watched)
    options = {"num_inference_steps": one["T"], "num_diffusion_steps": CONFIG["lazy_denoising"]}
    out = generate(pipes["lazy"], expected["lazy_class_labels"], one, "lazy-mar", **options)
    torch.testing.assert_close(out.images, expected[f"lazy_{one['name']}_latent"], atol=3e-4, rtol=0)
    table, recomputed = expected[f"lazy_{one['name']}_table"], expected[f"lazy_{one['name']}_recomputed"]
    lazy = table[:, 0] == 0
    assert torch.equal(torch.stack(rows, dim=1).to(torch.uint8), recomputed[:, lazy])
    assert encoded == table[lazy, 3].tolist() and len(rows) == lazy.sum()
    assert out.stats.accepted.tolist() == [[count, count] for count in table[:, 1].tolist()]


@pytest.mark.parametrize("steps", [24, 30, 100])
def test_the_parts_of_the_head_that_lazy_mar_evaluates(expected, steps, monkeypatch):
    """Rows of the input, and of the feed-forward layer of each block."""
    head = DenoisingHead(token_dim=2, condition_dim=3, hidden_size=8, num_layers=6).eval()
    model = MARLatentModel(MARTransformer(**SMALL), head, torch.zeros(1, dtype=torch.long), None, guided=True)
    rows = []
    head.input_projection.register_forward_pre_hook(lambda module, args: rows.append([len(args[0])] + [0] * 6))
    for layer, block in enumerate(head.blocks):
        block.fc1.register_forward_pre_hook(
            lambda module, args, layer=layer: rows[-1].__setitem__(1 + layer, len(args[0]))
        )
    state = SimpleNamespace(
        model=model, sampling=LatentSampling(guidance_scale=2.0), seeds=torch.zeros(1, dtype=torch.long), head_calls=0
    )
    positions = torch.zeros(1, 1, dtype=torch.long)
    LazyMAR()._denoise(state, torch.zeros(2, 1, 1, 3), positions, torch.zeros(1), steps)
    assert rows[::-1] == expected[f"lazy_head_{steps}"].tolist() and state.head_calls == steps


def test_the_published_fractions(expected):
    assert list(FRACTIONS) == expected["lazy_fractions"].tolist()
