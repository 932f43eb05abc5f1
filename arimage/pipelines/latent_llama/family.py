"""What arimage knows of latent Llama models before they are imported. No heavy imports."""

from ..family import Family


FAMILY = Family(
    title="Latent Llama",
    pipelines={"LatentLlamaPipeline": "pipeline_latent_llama"},
    exports={"LatentLlamaTransformer": "transformer_latent_llama"},
)
