"""The pipeline and the converter of RAR: guidance along the image, editing, batches, settings, damaged files."""

import pytest
import torch
from families import seeded
from PIL import Image
from pipelines.rar import tiny as tiny_rar
from safetensors.torch import save_file

from arimage import AutoPipeline
from arimage.convert import CheckpointError, convert_rar
from arimage.decoding import Sampling


LATENT = {"output_type": "latent"}
CHECKPOINT, VQ = tiny_rar.FIXTURES / "rar_tiny.bin", tiny_rar.FIXTURES / "maskgit-vqgan-tiny-f4.bin"


@pytest.fixture(scope="module")
def pipe():
    return tiny_rar.pipeline()


def test_guidance_grows_from_none_to_nearly_its_scale():
    logits = torch.randn(2, 1, 8, 5, generator=seeded(0))
    ranks = torch.arange(8)[None]
    for power in (0.5, 1.0, 2.75):
        sampling = Sampling(guidance_scale=9.0, guidance_scale_pow=power, guidance_length=8)
        grown = (1 - torch.cos(torch.pi * (ranks / 8) ** power)) / 2
        expected = (logits[1] + (1 + 8 * grown[..., None]) * (logits[0] - logits[1])).softmax(-1)
        torch.testing.assert_close(sampling.probabilities(logits, ranks), expected)
        torch.testing.assert_close(expected[:, 0], logits[0, :, 0].softmax(-1))
    constant = Sampling(guidance_scale=9.0, guidance_length=8)
    assert torch.equal(
        constant.probabilities(logits, ranks), Sampling(guidance_scale=9.0).probabilities(logits, ranks)
    )
    # Drafts may go past the end, and padding has no rank.
    outside = sampling.probabilities(logits, torch.tensor([[-1, 0, 7, 8, 9, 100, 3, 4]]))
    assert outside.isfinite().all()


def test_every_lane_has_a_power_of_its_own():
    logits, ranks = torch.randn(2, 3, 4, 5, generator=seeded(0)), torch.arange(4).expand(3, -1)
    each = [Sampling(guidance_scale=5.0, guidance_scale_pow=p, guidance_length=4) for p in (0.0, 1.0, 2.0)]
    together = Sampling.stack(each).probabilities(logits, ranks)
    for lane, sampling in enumerate(each):
        alone = sampling.probabilities(logits[:, lane : lane + 1], ranks[:1])
        torch.testing.assert_close(together[lane : lane + 1], alone)
    guided = Sampling(guidance_scale=5.0, guidance_scale_pow=1.0, guidance_length=4, guided_tokens=2)
    probabilities = guided.probabilities(logits, ranks)
    torch.testing.assert_close(probabilities[:, 2:], logits[0, :, 2:].softmax(-1))


def test_the_power_is_a_setting_of_a_call_and_of_the_saved_pipeline(pipe, tmp_path):
    condition = {"class_labels": [1, 2], **LATENT, "guidance_scale": 12.0}
    late, constant = (pipe(**condition, guidance_scale_pow=p, generator=seeded(0)).images for p in (None, 0.0))
    assert not torch.equal(late, constant)
    pipe.save_pretrained(tmp_path)
    loaded = AutoPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(loaded(**condition, generator=seeded(0)).images, late)
    for wrong in (-1.0, float("nan"), float("inf"), "late", True):
        with pytest.raises(ValueError, match="guidance_scale_pow is"):
            pipe(class_labels=1, guidance_scale_pow=wrong)


@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled:window=4", "sjd-tree", "sjd-lazy"])
def test_an_image_is_that_of_its_own_run(pipe, decoding):
    options = {"class_labels": [1, 2, 3], "guidance_scale": 6.0, "decoding": decoding, **LATENT}
    together = pipe(**options, generator=[seeded(seed) for seed in range(3)]).images
    in_turn = pipe(**options, generator=[seeded(seed) for seed in range(3)], batch_size=2).images
    assert torch.equal(in_turn, together) and not torch.equal(together[0], together[1])


def test_editing_keeps_what_is_not_masked(pipe):
    pixels = torch.rand(1, 3, 8, 8, generator=seeded(0))
    mask = Image.new("L", (8, 8))
    mask.paste(255, (0, 4, 8, 8))
    out = pipe(class_labels=1, image=pixels, mask_image=mask, output_type="pt", generator=seeded(0))
    kept = pipe.vq.encode(pixels * 2 - 1)
    assert torch.equal(out.tokens[:, :2], kept[:, :2]) and torch.equal(out.images[..., :4, :], pixels[..., :4, :])


def test_no_class_is_one_more_class(pipe):
    tokens = pipe(class_labels=pipe.num_classes, guidance_scale=1.0, generator=seeded(0), **LATENT).images
    assert tokens.shape == (1, 4, 4)
    with pytest.raises(ValueError, match="from 0 to 10"):
        pipe(class_labels=pipe.num_classes + 1)


def changed(tmp_path, name=None, tensor=None):
    state = torch.load(CHECKPOINT, weights_only=True)
    if tensor is None:
        del state[name]
    else:
        state[name] = tensor
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "rar.safetensors")
    return tmp_path / "rar.safetensors"


@pytest.mark.parametrize(
    "name", ["cls_token", "pos_embed", "target_aware_pos_embed", "timesteps_embeddings", "blocks.1.attn.k_norm.bias"]
)
def test_a_missing_table_is_named(tmp_path, name):
    with pytest.raises(CheckpointError, match=rf"has no '{name}'"):
        convert_rar(changed(tmp_path, name), VQ)


def test_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="pos_embed.*unaltered"):
        convert_rar(changed(tmp_path, "target_aware_pos_embed", torch.zeros(1, 1059, 48)), VQ)
    state = torch.load(VQ, weights_only=True)
    state["quantize.embedding.weight"] = state["quantize.embedding.weight"][:32].clone()
    torch.save(state, tmp_path / "vq.bin")
    with pytest.raises(CheckpointError, match="transformer has 64, .* 32"):
        convert_rar(CHECKPOINT, tmp_path / "vq.bin")
