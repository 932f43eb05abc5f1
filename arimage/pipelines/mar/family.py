"""What arimage knows of MAR before it is imported. No heavy imports."""

from ..family import NUM_HEADS, Converter, Family, path


FAMILY = Family(
    title="MAR",
    pipelines={"MARPipeline": "pipeline_mar"},
    exports={"MARTransformer": "transformer_mar"},
    converters=(
        Converter(
            "mar",
            "Convert the published files of MAR.",
            (
                path("checkpoint", "A trainer's checkpoint-last.pth, or .safetensors."),
                path("vae", "File of the image tokenizer, kl16.ckpt."),
                NUM_HEADS,
            ),
        ),
    ),
    instead={
        "jadechoghari/mar": "holds the weights of MAR without averaging: give the authors' checkpoint-last.pth to "
        "`arimage convert mar`",
    },
)
