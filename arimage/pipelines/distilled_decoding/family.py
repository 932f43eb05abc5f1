"""What arimage knows of Distilled Decoding before it is imported. No heavy imports."""

from ..family import Argument, Converter, Family, folder


FILES = folder("Folder with the files of the model and its image tokenizer, and of its teacher if you have it.")
FAMILY = Family(
    title="Distilled Decoding",
    pipelines={"LlamaGenDDPipeline": "pipeline_llamagen_dd", "VARDDPipeline": "pipeline_var_dd"},
    exports={"LlamaGenDDTransformer": "transformer_llamagen_dd", "VARDDTransformer": "transformer_var_dd"},
    # Their models are the teachers.
    builds_on=("llamagen", "var"),
    converters=(
        Converter(
            "llamagen_dd",
            "Convert the published files of a LlamaGen-DD (Distilled Decoding).",
            (
                FILES,
                Argument("image_size", "Side in pixels of the images the model was trained on.", int, 256),
                Argument("num_heads", "Attention heads, if it has no published size.", int | None, None),
            ),
        ),
        Converter("var_dd", "Convert the published files of a VAR-DD (Distilled Decoding).", (FILES,)),
    ),
)
