"""What `emoji_quality` measures on images whose figures are known."""

import torch
from emoji_quality import patch_kmeans_reconstructions, psnr


def test_psnr_of_a_known_error():
    images = torch.zeros(2, 3, 8, 8)
    assert abs(psnr(images, images + 0.1) - 20.0) < 1e-4


def test_patch_kmeans_rebuilds_images_of_few_patches():
    patches = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    index = torch.randint(4, (50, 2, 2), generator=torch.Generator().manual_seed(1))
    images = patches[index].permute(0, 3, 1, 4, 2, 5).reshape(50, 3, 8, 8)
    rebuilt = patch_kmeans_reconstructions(images[:40], images[40:], 4, 16)
    assert torch.allclose(rebuilt, images[40:], atol=1e-5)
