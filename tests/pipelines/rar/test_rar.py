"""The pipeline and the converter of RAR: guidance along the image, editing, batches, settings, damaged files."""

import pytest
import torch
from families import seeded
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
    assert torch.equal(loaded(**condition, generator=seeded(0)).images, late)
    for wrong in (-1.0, float("nan"), float("inf"), "late", True):
        with pytest.raises(ValueError, match="guidance_scale_pow is"):
            pipe(class_labels=1, guidance_scale_pow=wrong)


def changed(tmp_path, name=None, tensor=None):
    state = torch.load(CHECKPOINT, weights_only=True)
    if tensor is None:
        del state[name]
    else:
        state[name] = tensor
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "rar.safetensors")
    return tmp_path / "rar.safetensors"


def test_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="pos_embed.*unaltered"):
        convert_rar(changed(tmp_path, "target_aware_pos_embed", torch.zeros(1, 1059, 48)), VQ)
    state = torch.load(VQ, weights_only=True)
    state["quantize.embedding.weight"] = state["quantize.embedding.weight"][:32].clone()
    torch.save(state, tmp_path / "vq.bin")
    with pytest.raises(CheckpointError, match="transformer has 64, .* 32"):
        convert_rar(CHECKPOINT, tmp_path / "vq.bin")
