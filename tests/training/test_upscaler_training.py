"""An upscaler learns to bring images closer than interpolation does, goes on after an interruption, and leaves the
rest of its pipeline as it was."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pipelines.infinity import tiny as tiny_infinity
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from training.images import Images

from arimage import AutoPipeline
from arimage.settings.schema import check
from arimage.training.data.pictures import to_unit_range
from arimage.training.loop import OptimizerSettings
from arimage.training.recipe import PartRecipe
from arimage.training.tokenizers import upscaler
from arimage.training.tokenizers.upscaler import Discriminator, UpscalerSettings, UpscalerTask, sobel, train_upscaler


SETTINGS = UpscalerSettings(
    OptimizerSettings(steps=60, learning_rate=1e-2, weight_decay=0.0, warmup_steps=4, ema_decay=0.8),
    batch_size=4,
    max_shift=2,
    adversarial=0.02,
    adversarial_start=20,
    discriminator_channels=8,
)
MODEL = {"channels": [8, 12], "num_blocks": 1}
SIZE = 16


def squares(count, seed):
    """Images of one square each in a random colour on white."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.full((count, 3, SIZE, SIZE), 255, dtype=torch.uint8)
    alpha = torch.zeros(count, 1, SIZE, SIZE, dtype=torch.uint8)
    for image, cover in zip(images, alpha, strict=True):
        top, left = torch.randint(1, 9, (2,), generator=generator).tolist()
        image[:, top : top + 7, left : left + 7] = torch.randint(200, (3, 1, 1), generator=generator)
        cover[:, top : top + 7, left : left + 7] = 255
    return Images(images, alpha)


def task_of(pipe, settings=SETTINGS, **model):
    made = upscaler.ImageUpscaler(**MODEL | model)
    return UpscalerTask(made, pipe.vq, squares(8, 0), squares(4, 1), settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        rows, loss = [], UpscalerTask.loss
        monkeypatch.setattr(UpscalerTask, "loss", lambda self, step: rows.append(loss(self, step)) or rows[-1])
        pipe, out = tiny_llamagen.text_pipeline(), tmp_path_factory.mktemp("run")
        pipe = train_upscaler(pipe, MODEL, squares(8, 0), squares(4, 1), SETTINGS, out)
    return pipe, [{name: float(value) for name, value in figures.items()} for _, figures in rows], out


@pytest.mark.slow
def test_it_comes_closer_to_held_out_images_than_interpolation(trained):
    pipe, _, out = trained
    assert (out / "upscaled.png").is_file()
    images = to_unit_range(squares(4, 1).images)
    with torch.no_grad():
        decoded = pipe.vq.decode(pipe.vq.encode(F.avg_pool2d(images, 2)))
        errors = [
            (made.clamp(-1, 1) - images).pow(2).mean()
            for made in (pipe.upscaler.upscale(decoded), F.interpolate(decoded, scale_factor=2.0, mode="bicubic"))
        ]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.slow
def test_the_discriminator_begins_at_its_step(trained):
    _, rows, _ = trained
    assert [set(row) for row in rows[:20]] == [{"reconstruction"}] * 20
    assert [set(row) for row in rows[20:]] == [{"reconstruction", "adversarial", "discriminator"}] * 40
    # The hinge loss of a discriminator that says nothing is 1.
    assert sum(row["discriminator"] for row in rows[-4:]) / 4 < 0.9


def test_the_discriminator_begins_at_a_step_whatever_its_parts():
    settings = replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, accumulate=2), adversarial_start=1)
    task = task_of(tiny_llamagen.text_pipeline(), settings)
    assert ["adversarial" in task.loss(part)[1] for part in range(4)] == [False, False, True, True]


@pytest.mark.slow
def test_only_the_upscaler_is_trained(trained):
    pipe, before = trained[0], tiny_llamagen.text_pipeline()
    for name, module in before.components.items():
        if isinstance(module, torch.nn.Module):
            for key, value in module.state_dict().items():
                assert torch.equal(getattr(pipe, name).state_dict()[key], value), f"{name} {key}"


@pytest.mark.slow
def test_an_interrupted_run_ends_as_if_it_had_not_been(trained, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    loss = UpscalerTask.loss

    def stopping(self, step):
        if step == 31:
            raise Stop
        return loss(self, step)

    run = partial(train_upscaler, model_config=MODEL, data=squares(8, 0), heldout=squares(4, 1), settings=SETTINGS)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(UpscalerTask, "loss", stopping)
        patch.setattr(upscaler, "fit", partial(upscaler.fit, checkpoint_every_seconds=0))
        run(tiny_llamagen.text_pipeline(), out=tmp_path)
    pipe = run(tiny_llamagen.text_pipeline(), out=tmp_path)
    expected = trained[0].upscaler.state_dict()
    for name, value in pipe.upscaler.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-3, rtol=0)


def test_the_losses_of_the_two_networks_leave_each_other_alone():
    torch.manual_seed(0)
    discriminator = Discriminator(8)
    made, real, enlarged = (torch.rand(2, 3, 16, 16).requires_grad_() for _ in range(3))
    task = task_of(tiny_llamagen.text_pipeline())
    fooled, told = task.adversarial(discriminator, made, real, enlarged)
    parameters = list(discriminator.parameters())
    assert torch.autograd.grad(told, made, retain_graph=True, allow_unused=True) == (None,)
    assert all(one is not None for one in torch.autograd.grad(told, parameters, retain_graph=True))
    assert torch.autograd.grad(fooled, parameters, retain_graph=True, allow_unused=True) == (None,) * len(parameters)
    # A step against the gradient raises the score.
    (slope,) = torch.autograd.grad(fooled, made)
    better, _ = task.adversarial(discriminator, made - 0.1 * slope / slope.norm(), real, enlarged)
    assert better < fooled


@pytest.mark.every(2)
@pytest.mark.parametrize("changed", ["shrunk_share", "permuted_share", "ground_share", "max_shift"])
def test_images_are_changed_as_the_settings_say(changed):
    none = replace(SETTINGS, shrunk_share=0.0, permuted_share=0.0, ground_share=0.0, max_shift=0)
    pipe, known = tiny_llamagen.text_pipeline(), to_unit_range(squares(8, 0).images)

    def levels(image):
        return tuple(((image.flatten() + 1) * 127.5).round().tolist())

    known = {levels(image) for image in torch.cat([known, known.flip(-1)])}

    def share_of_known(settings):
        task = task_of(pipe, settings)
        batches = [task.batch(step) for step in range(10)]
        assert all(batch.shape == (4, 3, SIZE, SIZE) and batch.abs().max() <= 1 for batch in batches)
        return sum(levels(image) in known for batch in batches for image in batch) / 40

    assert share_of_known(none) == 1
    assert share_of_known(replace(none, **{changed: 3 if changed == "max_shift" else 1.0})) < 0.5


@torch.no_grad()
@pytest.mark.parametrize("build", [tiny_llamagen.text_pipeline, lambda: tiny_var.pipeline("text")])
def test_noise_replaces_tokens_by_near_ones(build):
    task = task_of(build())
    images = to_unit_range(squares(8, 0).images)
    vq, seen = task.frozen.vq, []
    clean = vq.encode(F.avg_pool2d(images, 2))
    vq.decode = lambda codes: seen.append(codes)
    for share in (0.0, 0.5, 1.0):
        task.decoded(images, torch.full((8,), share))
    maps = [codes if isinstance(codes, list) else [codes] for codes in (clean, *seen)]
    changed = [
        float(torch.cat([(a != b).flatten() for a, b in zip(maps[0], noisy, strict=True)]).float().mean())
        for noisy in maps[1:]
    ]
    assert changed[0] == 0 and 0.3 < changed[1] < 0.7 and changed[2] == 1
    vectors = vq.code_vectors()
    near, far = (
        torch.cdist(vectors[maps[0][-1].flatten()][:, None], vectors[others][:, None]).mean()
        for others in (maps[3][-1].flatten(), torch.randint(len(vectors), maps[0][-1].flatten().shape))
    )
    assert near < far


def test_gradients_are_those_of_sobel():
    images = torch.rand(2, 3, 7, 9)
    slope = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    for found, kernel in zip(sobel(images), (slope, slope.T), strict=True):
        expected = F.conv2d(images, kernel.expand(3, 1, 3, 3), groups=3)
        torch.testing.assert_close(found, expected)


def test_the_command_trains_by_a_recipe_and_saves_the_pipeline(tmp_path, monkeypatch):
    parts = {"model": MODEL, "training": {"batch_size": 2, "max_shift": 2}}
    optimizer = {"steps": 2, "learning_rate": 1e-3}
    recipe = check(PartRecipe, {"part": "upscaler", "optimizer": optimizer, **parts}, "mine.toml")
    splits = {"split": "train", "heldout_split": "train", "workers": 0}
    for split, seed in (("train", 0), ("heldout", 1)):
        folder = tmp_path / split
        folder.mkdir()
        for number, image in enumerate(squares(3, seed).images.permute(0, 2, 3, 1).numpy()):
            Image.fromarray(image).save(folder / f"{number}.png")
    pipe = tiny_llamagen.text_pipeline()
    upscaler.run_upscaler(recipe, pipe, tmp_path / "train", tmp_path / "heldout", tmp_path / "run", **splits)
    loaded = AutoPipeline.from_pretrained(tmp_path / "run" / "model")
    assert loaded.image_sizes == [(SIZE, SIZE), (SIZE // 2, SIZE // 2)]
    for name, value in loaded.upscaler.state_dict().items():
        torch.testing.assert_close(value, pipe.upscaler.state_dict()[name], atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="InfinityPipeline takes no upscaler: give"):
        upscaler.run_upscaler(recipe, tiny_infinity.pipeline(), tmp_path, tmp_path, tmp_path / "other", **splits)


@pytest.mark.parametrize(
    ("table", "setting", "said"),
    [
        ("model", {"channels": 0}, r"table \[model\]: channels is 0: give a list"),
        ("model", {"width": 8}, r"table \[model\]: width is not a setting"),
        ("training", {"noisy_share": 2.0}, r"table \[training\]: noisy_share is 2.0: give at most 1"),
        ("training", {"discriminator_channels": 12}, "discriminator_channels is 12"),
    ],
)
def test_a_wrong_setting_of_a_recipe_is_refused(tmp_path, table, setting, said):
    optimizer = {"steps": 2, "learning_rate": 1e-3}
    recipe = check(PartRecipe, {"part": "upscaler", "optimizer": optimizer, table: setting}, "mine.toml")
    with pytest.raises(ValueError, match=said):
        upscaler.run_upscaler(recipe, tiny_llamagen.text_pipeline(), tmp_path, tmp_path, tmp_path / "run")
