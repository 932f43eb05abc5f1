"""A codebook of patches as the image tokenizer of a pipeline."""

import pytest
import tiny
import torch
from pipelines.arpg import tiny as arpg
from pipelines.llamagen import tiny as llamagen

from arimage import AutoPipeline, PatchVQModel


def patches(channels: int = 3, size: int = tiny.SCALE_FACTOR) -> PatchVQModel:
    return tiny.randomise(PatchVQModel(size, tiny.CODES, channels), 0)


@pytest.mark.parametrize("channels", [1, 3])
@torch.no_grad()
def test_decoded_patches_are_rows_of_the_codebook_in_place(channels):
    vq = patches(channels, 4)
    codes = torch.randint(tiny.CODES, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    images = vq.decode(codes)
    assert images.shape == (2, 3, 12, 20)
    part = vq.code_vectors()[codes[1, 2, 3]].view(channels, 4, 4).expand(3, 4, 4)
    assert torch.equal(images[1, :, 8:12, 12:16], part)
    assert torch.equal(vq.encode(images), codes)


@torch.no_grad()
def test_an_image_becomes_the_nearest_patches():
    vq = patches()
    images = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1
    error = (vq.decode(vq.encode(images)) - images).square()
    for code in range(tiny.CODES):
        other = (vq.decode(torch.full((2, 4, 6), code)) - images).square()
        blocks = [it.unfold(2, 2, 2).unfold(3, 2, 2).sum((1, 4, 5)) for it in (error, other)]
        assert (blocks[0] <= blocks[1] + 1e-5).all()
    with pytest.raises(ValueError, match="images of 7x12 pixels do not fit this tokenizer"):
        vq.encode(images[:, :, :7])


@pytest.mark.parametrize("tiny_pipeline", [lambda: arpg.pipeline("text"), llamagen.text_pipeline])
def test_a_pipeline_with_patches_is_saved_and_edits_images(tiny_pipeline, tmp_path):
    pipe = tiny_pipeline()
    pipe.register_modules(vq=patches())
    made = pipe(["a red heart", "green tree"], generator=torch.Generator().manual_seed(0), output_type="pt")
    assert torch.equal(pipe.vq.encode(made.images * 2 - 1), made.tokens)
    pipe.save_pretrained(tmp_path)
    loaded = AutoPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.vq, PatchVQModel)
    again = loaded(["a red heart", "green tree"], generator=torch.Generator().manual_seed(0), output_type="pt")
    assert torch.equal(again.images, made.images)
    mask = torch.zeros(1, 1, *made.images.shape[-2:])
    mask[..., -2:, :] = 1
    edited = loaded("a red heart", image=made.images[:1], mask_image=mask, output_type="latent").tokens
    assert torch.equal(edited[:, :-1], made.tokens[:1, :-1])
