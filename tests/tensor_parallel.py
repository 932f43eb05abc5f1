"""The tokens of small models in one process, or with their language model divided over the processes of torchrun:
python tensor_parallel.py FILE.json"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pipelines.glm_image import tiny as tiny_glm_image
from pipelines.janus import tiny as tiny_janus
from transformers import GlmImageForConditionalGeneration, JanusForConditionalGeneration
from transformers.distributed import DistributedConfig

import arimage


DECODINGS = ("ar", "sjd-coupled")
DIVIDED = dist.is_torchelastic_launched()


def load(kind, folder):
    plan = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=2)} if DIVIDED else {}
    return kind.from_pretrained(folder, **plan).eval()


def janus():
    pipe = arimage.JanusPipeline(load(JanusForConditionalGeneration, tiny_janus.FOLDER))
    ids = torch.tensor([[tiny_janus.FIRST_SPECIAL, 5, 6, 7, tiny_janus.FIRST_SPECIAL + 3]])
    return pipe, {"input_ids": ids}, pipe.model.model.language_model.layers[0].self_attn.q_proj


def glm_image():
    model = load(GlmImageForConditionalGeneration, tiny_glm_image.FOLDER / "vision_language_encoder")
    pipe = tiny_glm_image.GlmImagePipeline.from_pretrained(tiny_glm_image.FOLDER, vision_language_encoder=model)
    return pipe, {"prompt": "a red heart"}, model.model.language_model.layers[0].self_attn.q_proj


def main(path):
    found = {}
    for family in (janus, glm_image):
        pipe, condition, layer = family()
        pipe.set_progress_bar_config(disable=True)
        for decoding in DECODINGS:
            seed = torch.Generator().manual_seed(0)
            out = pipe(**condition, decoding=decoding, generator=seed, output_type="latent")
            tokens = out.tokens if isinstance(out.tokens, list) else [out.tokens]
            found[f"{family.__name__} {decoding}"] = [one.flatten().tolist() for one in tokens]
        weight = layer.weight.to_local() if DIVIDED else layer.weight
        found[f"{family.__name__} rows"] = len(weight)
    rank = dist.get_rank() if DIVIDED else 0
    Path(f"{path}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
