"""Calls as a type checker sees them. pyright reports a wrong call that is not marked, and a mark on a right one."""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from typing import assert_type

import torch

from arimage import (
    ARPGPipeline,
    CosmosPipeline,
    Emu35Pipeline,
    GlmImagePipeline,
    InfinityPipeline,
    LlamaGenPipeline,
    MARPipeline,
    SpeculativeJacobiDecoding,
)
from arimage.pipelines.output import ImagePipelineOutput, VideoPipelineOutput


def tokens(pipe: LlamaGenPipeline, seeds: torch.Generator):
    out = pipe("a", guidance_scale=2, top_k=1, height=64, generator=seeds, decoding="sjd", return_dict=True)
    assert_type(out, ImagePipelineOutput | tuple)
    pipe(
        class_labels=[1, 2], decoding=SpeculativeJacobiDecoding(), num_images_per_prompt=2, callback_on_step_end=print
    )
    pipe("a", guidance_scale="x")  # pyright: ignore[reportArgumentType]
    pipe("a", guidance_scale=[1.0, 2.0])  # pyright: ignore[reportArgumentType]
    pipe("a", return_dict="yes")  # pyright: ignore[reportArgumentType]
    pipe(3)  # pyright: ignore[reportArgumentType]
    pipe("a", nonsense=3)  # pyright: ignore[reportCallIssue]
    pipe("a", 1, None)  # pyright: ignore[reportCallIssue]


def orders(pipe: ARPGPipeline):
    pipe("a", order="raster", guided_tokens=3, batch_size=2)
    pipe("a", guided_tokens="x")  # pyright: ignore[reportArgumentType]
    pipe("a", nonsense=3)  # pyright: ignore[reportCallIssue]


def scales(pipe: InfinityPipeline):
    pipe("a", guidance_scale=[1.0, 2.0], temperature=1.0, output_type="pt", cfg_insertion_layer=-1)
    pipe("a", guidance_scale="x")  # pyright: ignore[reportArgumentType]
    pipe("a", nonsense=3)  # pyright: ignore[reportCallIssue]


def latents(pipe: MARPipeline):
    pipe(class_labels="cat", guidance_schedule="constant", num_inference_steps=8)
    pipe("a", top_k=1)  # pyright: ignore[reportCallIssue]
    pipe("a", temperature="x")  # pyright: ignore[reportArgumentType]


def language_models(pipe: Emu35Pipeline, decoded: GlmImagePipeline):
    pipe("a", "b", ratio="16:9", top_p=0.9, callback_on_step_end_tensor_inputs=["tokens"])
    pipe("a", guidance_scale=[1.0])  # pyright: ignore[reportArgumentType]
    decoded("a", num_inference_steps=3, temperature=0.5, width=512)
    decoded()  # pyright: ignore[reportCallIssue]
    decoded("a", guided_tokens=3)  # pyright: ignore[reportCallIssue]


def videos(pipe: CosmosPipeline):
    out = pipe("a", num_frames=9, guidance_scale=2.0, num_videos_per_prompt=2, output_type="latent")
    assert_type(out, VideoPipelineOutput | tuple)
    pipe("a", num_images_per_prompt=2)  # pyright: ignore[reportCallIssue]
    pipe("a", num_videos_per_prompt="x")  # pyright: ignore[reportArgumentType]
