"""The parts of the docstrings of `__call__` that the pipelines share."""

import re
from collections.abc import Callable
from inspect import cleandoc
from textwrap import indent


PARTS = {
    "class_or_text": """
        prompt (`str` or `list[str]`, *optional*):
            What to generate: a text, or for class-conditional checkpoints the name of a class ("golden retriever").
        class_labels (`int`, `str`, a list of them or `torch.LongTensor`, *optional*):
            The classes to generate, for class-conditional checkpoints: ids from 0 to `pipe.num_classes` - 1, or names.
    """,
    "prompt_embeds": """
        prompt_embeds (`torch.Tensor`, *optional*), prompt_attention_mask (`torch.Tensor`, *optional*):
            The output of the text encoder [B, P, D], padded on the right, and its mask [B, P], in place of `prompt`.
    """,
    "image": """
        image (`PIL.Image.Image`, `np.ndarray`, `torch.Tensor` or a list of them, *optional*):
            An image to change, together with `mask_image`: one for all prompts, or one per prompt. It is resized to
            the size of the call.
    """,
    "raster_mask": """
        mask_image (as `image`, *optional*):
            White where the image is generated again, black where its pixels stay. A token is generated if any of its
            pixels is white. Tokens are generated row by row: the new ones match what stays above them and to their
            left in the row, and do not see what stays below and to their right.
    """,
    "noise": """
        noise (`torch.Tensor`, *optional*):
            Standard normal numbers [B, N, D] that the images are made from: per image one vector of the codebook's
            width D per token. By default they come from the seeds.
    """,
    "common": """
        guidance_scale (`float`, *optional*, defaults to the checkpoint's):
            s in u + s (c - u), with logits c under the condition and u without it. 1 or less disables guidance.
        temperature (`float`, *optional*), top_k (`int`, *optional*), top_p (`float`, *optional*):
            Sampling settings, by default the checkpoint's; see `Sampling`. `top_k=1` is greedy decoding.
        guided_tokens (`int`, *optional*):
            Guide only the first `guided_tokens` tokens of each image. By default all are guided.
    """,
    "size": """
        height (`int`, *optional*), width (`int`, *optional*):
            The size in pixels, by default the first of `pipe.image_sizes`.
        num_images_per_prompt (`int`, *optional*, defaults to 1):
            Images per prompt or class.
    """,
    "run": """
        batch_size (`int`, *optional*):
            How many images are generated at a time; by default all. Of more images the first begin, and whenever some
            are finished others take their rows, so that none waits for the slowest; finished ones are decoded to
            pixels in groups of so many. Every image is that of its own run, up to the rounding of differently shaped
            matrix products.
        generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
            Makes the images reproducible: one for the call, or a list with one per image.
        decoding (`Decoding` or `str`, *optional*, defaults to `pipe.decoding`):
            The decoding method of this call, or one of the names in `pipe.decoding_names`, with settings behind it as
            on the command line.
        output_type (`str`, *optional*, defaults to `"pil"`):
            `"pil"`, `"np"`, `"pt"`, or `"latent"` for the tokens.
        return_dict (`bool`, *optional*, defaults to `True`):
            Return an object with what the call cost instead of a tuple.
        callback_on_step_end (`Callable`, *optional*):
            Called after every forward pass as `callback(pipe, step, passes, tensors)`, with `pipe.current_call` set.
            `pipe._interrupt = True` in it stops this call. With `"ar"` and `"next-scale"` it may return a dict whose
            `"tokens"` replace those that this pass decided; what follows is generated from them.
        callback_on_step_end_tensor_inputs (`list[str]`, *optional*, defaults to `["tokens"]`):
            What `tensors` holds: `"tokens"` [B, N], drafts included, and `"decided"` [B, N].
    """,
}
PARTS["call"] = cleandoc(PARTS["size"]) + "\n" + cleandoc(PARTS["run"])
PARTS["common"] = cleandoc(PARTS["common"]) + "\n" + PARTS["call"]


def fill_docstring(example: str) -> Callable[[Callable], Callable]:
    """Replace the lines `{name}` of a docstring by PARTS[name] and the line `{example}` by `example`, indented as they
    are."""
    parts = {**PARTS, "example": example}

    def fill(function: Callable) -> Callable:
        function.__doc__ = re.sub(
            r"^( *)\{(\w+)\}$",
            lambda line: indent(cleandoc(parts[line[2]]), line[1]),
            function.__doc__ or "",
            flags=re.MULTILINE,
        )
        return function

    return fill
