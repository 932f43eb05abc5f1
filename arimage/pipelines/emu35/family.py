"""What arimage knows of Emu3.5 before it is imported. No heavy imports."""

from ...settings.schema import Area, Number, Whole
from ..family import FOLDER, Argument, Converter, Family, HubFiles, ModelType, PublishedCheckpoint, folder, path
from ..published_parts import EMU_FILES


def _published(name: str, base: bool) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name.lower(),
        family="emu35",
        files={
            "folder": HubFiles(f"BAAI/{name}", EMU_FILES),
            # The repository has the same tensors as a pickle, too.
            "vision_tokenizer": HubFiles("BAAI/Emu3.5-VisionTokenizer", ("config.json", "model.safetensors")),
        },
        image_size=1024,
        parameters=34_103_000_000,
        other_parameters=455_300_000,
        download=70_000_000_000,
        licence="Apache-2.0",
        licence_source="https://github.com/baaivision/Emu3.5",
        options={"base": True} if base else {},
    )


FAMILY = Family(
    title="Emu3.5",
    pipelines={"Emu35Pipeline": "pipeline_emu35"},
    exports={"IBQModel": "ibq_emu35"},
    converters=(
        Converter(
            "emu35",
            "Convert a published Emu3.5-Image or Emu3.5.",
            (
                folder("Emu3.5-Image or Emu3.5, as published by BAAI."),
                path("vision_tokenizer", "BAAI's folder Emu3.5-VisionTokenizer.", FOLDER),
                Argument("image_area", "Pixels of a training image.", int, 1024 * 1024),
                Argument("base", "The folder is Emu3.5, not Emu3.5-Image.", bool, False),
            ),
        ),
    ),
    checkpoints=(_published("Emu3.5-Image", base=False), _published("Emu3.5", base=True)),
    instead={"BAAI/Emu3.5-VisionTokenizer": "is an image tokenizer, which emu3.5-image downloads: give emu3.5-image"},
    # Its config.json names the model type of Emu3; its attention normalises queries and keys.
    model_types=(ModelType("Emu3", "emu35", tensor=".self_attn.q_norm.weight"),),
    config={"image_area": Area, "token_ids": dict[str, Whole] | None, "edit_guidance_scale": Number},
)
