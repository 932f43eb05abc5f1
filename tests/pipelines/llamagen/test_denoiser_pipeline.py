"""A denoiser is a component of its pipeline, and sjd2 samples from the distribution of the model with it or with any
other."""

import pytest
import torch
from families import seeded
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import LlamaGenPipeline, SpeculativeJacobiDecoding
from arimage.pipelines.llamagen.denoiser_llamagen import LlamaGenDenoiser


def tokens(pipe, **call):
    return pipe(class_labels=[1, 2], generator=seeded(0), output_type="latent", **call).tokens


def test_greedy_images_are_those_of_one_token_per_step_whatever_the_denoiser():
    pipe = tiny_llamagen.class_pipeline()
    expected = tokens(pipe, top_k=1, decoding="ar")
    for seed in range(2):
        pipe.denoiser = tiny_llamagen.denoiser(pipe.transformer, seed)
        for levels in (1, 3):
            assert torch.equal(tokens(pipe, top_k=1, decoding=SpeculativeJacobiDecoding(4, levels=levels)), expected)


def test_a_pipeline_without_a_denoiser_says_what_it_lacks():
    pipe = tiny_llamagen.class_pipeline()
    pipe = LlamaGenPipeline(pipe.transformer, pipe.vq)
    assert "sjd2" not in pipe.decoding_names
    with pytest.raises(ValueError, match="no denoiser: train one with `arimage train denoiser`"):
        pipe(class_labels=1, decoding="sjd2")


def test_a_denoiser_of_another_width_is_refused():
    pipe = tiny_llamagen.class_pipeline()
    with pytest.raises(ValueError, match="the denoiser is 768 wide, the transformer 32"):
        LlamaGenPipeline(pipe.transformer, pipe.vq, denoiser=LlamaGenDenoiser())
