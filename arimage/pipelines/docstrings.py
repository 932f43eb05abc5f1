"""Parts of the docstrings of `__call__`, shared by the pipelines."""

import re
from dataclasses import fields
from inspect import cleandoc
from textwrap import indent


PARTS = {
    "class_or_text": """
        prompt (`str` or `list[str]`, *optional*):
            What to generate: a text or, for class-conditional checkpoints, the name of a class ("golden retriever").
        class_labels (`int`, `str`, a list of them or `torch.LongTensor`, *optional*):
            The classes to generate, for class-conditional checkpoints: ids from 0 to `pipe.num_classes` - 1, or names.
    """,
    "prompt_embeds": """
        prompt_embeds (`torch.Tensor`, *optional*), prompt_attention_mask (`torch.Tensor`, *optional*):
            The output of the text encoder [B, P, D], padded on the right, and its mask [B, P], in place of `prompt`.
    """,
    "image": """
        image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
            An image to edit, together with `mask_image`: one for all prompts, or one per prompt. It is resized to the
            size of the call.
    """,
    "references": """
        image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor`, a list of them or a list of lists, *optional*):
            Without `mask_image`: reference images that the model reads together with the prompt, up to
            `pipe.abilities.max_references`. One image or a list is for every prompt, a list of lists holds one list
            per prompt. With `mask_image`: an image to edit, one for all prompts or one per prompt, which is resized to
            the size of the call.
    """,
    "raster_mask": """
        mask_image (as `image`, *optional*):
            White where the image is generated again, black where its pixels stay. A token is generated if any of its
            pixels is white. Tokens are generated row by row, so new tokens depend on what stays above them and to
            their left in the row, but not on what stays below and to their right.
    """,
    "mask_on_all_sides": """
        mask_image (as `image`, *optional*):
            White where the image is generated again, black where its pixels stay. A token is generated if any of its
            pixels is white. New tokens depend on what stays on all sides of them.
    """,
    "noise": """
        noise (`torch.Tensor`, *optional*):
            Standard normal noise [B, N, D] that the images are generated from, with the width D of the codebook. By
            default it is derived from the seeds.
    """,
    "decoder": """
        num_inference_steps (`int`, *optional*, defaults to the checkpoint's):
            Denoising steps of the decoder.
        latents (`torch.Tensor`, *optional*):
            Noise that the decoder begins with, [B, C, height / 8, width / 8], by default derived from the seed of each
            image.
    """,
    "guidance": """
        guidance_scale (`float`, *optional*, defaults to the checkpoint's):
            s in u + s (c - u), with logits c under the condition and u without it. 1 or less disables guidance.
    """,
    "cuts": """
        temperature (`float`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
            Sampling settings, by default the checkpoint's; see `Sampling`. `top_k=1` is greedy decoding.
        min_p (`float`, *optional*):
            Sample only tokens that are at least `min_p` times as probable as the most probable one, by default as many
            as the checkpoint says. 0 keeps all.
    """,
    "guided_tokens": """
        guided_tokens (`int`, *optional*):
            Apply guidance only to the first `guided_tokens` tokens of each image, by default to all.
    """,
    "continuous_sampling": """
        num_diffusion_steps (`int` or `list[int]`, *optional*, defaults to the checkpoint's):
            Denoising steps per token. A list gives the number of steps in each of several equal parts of the training
            steps, from the least noise to the most.
        guidance_scale (`float`, *optional*, defaults to the checkpoint's):
            s in u + s (c - u), with the head's predictions c with the condition and u without it. 1 or less disables
            guidance.
        guidance_schedule (`str`, *optional*, defaults to the checkpoint's):
            With `"linear"`, guidance grows from 1 to `guidance_scale` in proportion to the number of generated tokens;
            with `"constant"`, it does not change. `LatentSampling` has two more.
        temperature (`float`, *optional*, defaults to the checkpoint's):
            Factor on the noise of the denoising steps.
    """,
    "first_frame": """
        image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
            The first frame: one for all prompts, or one per prompt. It is resized and cropped to the size of the call.
    """,
    "negative_prompt_embeds": """
        negative_prompt_embeds (`torch.Tensor`, *optional*):
            The output of the text encoder [B, P, D] or [1, P, D], in place of `negative_prompt`.
        negative_prompt_attention_mask (`torch.Tensor`, *optional*):
            Its mask [B, P]; without it all tokens are read.
    """,
    "input_ids": """
        input_ids (`torch.LongTensor`, *optional*), attention_mask (`torch.Tensor`, *optional*):
            Token ids [B, P] in place of `prompt`, header of the image included, padded on the left, and their mask.
            The size in the header must match the size of the call.
        negative_input_ids (`torch.LongTensor`, *optional*), negative_attention_mask (`torch.Tensor`, *optional*):
            The same in place of `negative_prompt`, [1 or B, P'].
    """,
    "size": """
        height (`int`, *optional*), width (`int`, *optional*):
            The size in pixels, by default the first of `pipe.image_sizes`.
        num_images_per_prompt (`int`, *optional*, defaults to 1):
            Images per prompt or class.
    """,
    "run": """
        batch_size (`int`, *optional*):
            The number of images that are generated at a time, by default all. If there are more, a waiting image
            begins whenever another one is finished, so that none waits for the slowest. Finished images are decoded
            to pixels in groups of this size. The images do not depend on `batch_size`, up to the rounding of
            differently shaped matrix products.
        generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
            Makes the images reproducible: one generator for the call, or a list with one per image.
        decoding (`Decoding` or `str`, *optional*, defaults to `pipe.decoding`):
            The decoding method of this call: an object, or a name from `pipe.decoding_names`, optionally with settings
            as in `"sjd-coupled:window=16"`; see `as_decoding`.
        output_type (`str`, *optional*, defaults to `"pil"`):
            `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
        return_dict (`bool`, *optional*, defaults to `True`):
            Return an output object, which includes statistics, instead of a tuple.
        callback_on_step_end (`Callable`, *optional*):
            Called after every forward pass as `callback(pipe, step, passes, tensors)`, with `pipe.current_call` set.
            Setting `pipe._interrupt = True` in it stops this call. With `"ar"` and `"next-scale"` it may return a dict
            whose `"tokens"` replace those that this pass decided; later tokens are generated from them.
        callback_on_step_end_tensor_inputs (`list[str]`, *optional*, defaults to `["tokens"]`):
            The contents of `tensors`: `"tokens"` [B, N], drafts included, `"decided"` [B, N], and `"work"` [B], the
            share of its work that each image has done.
    """,
}
PARTS["sampling"] = cleandoc(PARTS["guidance"]) + "\n" + cleandoc(PARTS["cuts"])
PARTS["call"] = cleandoc(PARTS["size"]) + "\n" + cleandoc(PARTS["run"])
PARTS["common"] = "\n".join(map(cleandoc, (PARTS["sampling"], PARTS["guided_tokens"], PARTS["call"])))


def filled(docstring: str, example: str, output: type) -> str:
    """The docstring of a call: `docstring`, in which lines `{name}` are replaced with PARTS[name], then what the call
    returns, and `example`, a few lines of code."""
    parts = re.sub(
        r"^( *)\{(\w+)\}$",
        lambda line: indent(cleandoc(PARTS[line[2]]), line[1]),
        cleandoc(docstring),
        flags=re.MULTILINE,
    )
    first = fields(output)[0].name
    returned = f"Returns:\n    [`{output.__name__}`] or `tuple`: the output, or the tuple `({first},)`."
    imported = "from arimage import AutoPipeline\n" if "AutoPipeline" in example else ""
    prompts = indent(f"import torch\n{imported}{example.rstrip()}", ">>> ")
    return f"{parts}\n\n{returned}\n\nExamples:\n    ```py\n{indent(prompts, '    ')}\n    ```\n"
