import torch
import torch.nn.functional as F
from emoji_quality import patch_kmeans_reconstructions, psnr, retrieval_accuracy


def test_retrieval_finds_copies_at_any_resolution_and_misses_strangers():
    gallery = torch.rand(12, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    gallery = F.interpolate(F.avg_pool2d(gallery, 16), size=(64, 64))
    names = [str(i // 2) for i in range(12)]
    samples = F.interpolate(gallery[[0, 5, 11]], size=(128, 128))
    assert retrieval_accuracy(samples, ["0", "2", "5"], gallery, names) == {"top-1": 1.0, "top-5": 1.0}
    assert retrieval_accuracy(samples, ["none"] * 3, gallery, names) == {"top-1": 0.0, "top-5": 0.0}


def test_top_5_counts_the_fifth_nearest_and_not_the_sixth():
    gallery = torch.arange(8.0).reshape(8, 1, 1, 1).expand(-1, 3, 32, 32) / 10
    names = [str(i) for i in range(8)]
    sample = gallery[:1]
    assert retrieval_accuracy(sample, ["4"], gallery, names) == {"top-1": 0.0, "top-5": 1.0}
    assert retrieval_accuracy(sample, ["5"], gallery, names) == {"top-1": 0.0, "top-5": 0.0}


def test_psnr_of_a_known_error():
    images = torch.zeros(2, 3, 8, 8)
    assert abs(psnr(images, images + 0.1) - 20.0) < 1e-4


def test_patch_kmeans_rebuilds_images_of_few_patches():
    patches = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    index = torch.randint(4, (50, 2, 2), generator=torch.Generator().manual_seed(1))
    images = patches[index].permute(0, 3, 1, 4, 2, 5).reshape(50, 3, 8, 8)
    rebuilt = patch_kmeans_reconstructions(images[:40], images[40:], 4, 16)
    assert torch.allclose(rebuilt, images[40:], atol=1e-5)
