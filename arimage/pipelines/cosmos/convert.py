"""From the published files of Cosmos-Predict1's autoregressive models
(https://github.com/nvidia-cosmos/cosmos-predict1) to a `CosmosPipeline`."""

import re
from pathlib import Path

import torch
from diffusers.utils import logging

from ...convert.checkpoint import OriginalTensors, load_original, pipeline_of, save_whole
from ...convert.folder import load_t5_encoder
from ...convert.paths import CheckpointError, check_vacant
from ...decoding import SpeculativeJacobiDecoding
from .convert_tokenizer import convert_cosmos_tokenizer
from .pipeline_cosmos import CosmosPipeline
from .transformer_cosmos import CosmosTransformer


logger = logging.get_logger(__name__)

KIND = "Cosmos-Predict1 autoregressive model"
# Width and depth of the weights that NVIDIA published, whose licence asks for its guardrail.
PUBLISHED_SHAPES = ((4096, 16), (5120, 40))
# Pixels per token and frames per map of the tokenizer that the models were trained with.
COMPRESSION = (16, 8)
# Published sampling without text, and with it.
SAMPLING = {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 0.8}
TEXT_SAMPLING = SAMPLING | {"top_p": 0.7}
# Parts of the names in the layouts that the authors trained in, and published next to model.pt.
LAYOUTS = {"self_attention.layernorm_qkv": "TransformerEngine", "layernorm_mlp": "TransformerEngine"}
LAYOUTS |= {"self_attention.linear_qkv": "NeMo", "embedding.word_embeddings": "NeMo"}
# Ours and the original's, replaced from top to bottom.
NAMES = (
    ("token_embedding.", "tok_embeddings."),
    ("head.", "output."),
    ("blocks.", "layers."),
    (".feed_forward_norm.", ".ffn_norm."),
    (".q_proj.", ".wq."),
    (".k_proj.", ".wk."),
    (".v_proj.", ".wv."),
    (".out_proj.", ".wo."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)


def convert_cosmos(
    model_file: str | Path,
    *,
    tokenizer: str | Path,
    text_encoder: str | Path | None = None,
    num_frames: int = 33,
    height: int = 640,
    width: int = 1024,
    yarn: bool | None = None,
    out: str | Path | None = None,
) -> CosmosPipeline:
    """The pipeline of a published model, with the published sampling defaults, exact parallel decoding, and the
    weights in the dtype of their files, those of the text encoder in that of the model.

    Args:
        model_file: `model.pt` of an autoregressive Cosmos-Predict1.
        tokenizer: folder of Cosmos-Tokenize1-DV8x16x16-720p, see `convert_cosmos_tokenizer`. The tokenizers of version
            0.1 have files of the same shapes and do not fit.
        text_encoder: folder of the T5 encoder (google-t5/t5-11b) and its tokenizer, for models with text. Without it
            the pipeline takes `prompt_embeds`.
        num_frames, height, width: of the videos that the model was trained for.
        yarn: as in `cosmos_transformer_from_original`.
        out: a new or empty folder to save the pipeline to. It appears when all of it is written, or not at all.

    Raises:
        CheckpointError: if a file cannot be read, does not fit the others, or `out` is taken.
    """
    check_vacant(out)
    vq = convert_cosmos_tokenizer(tokenizer)
    spatial, temporal = compression = (vq.scale_factor, vq.config.temporal_compression_ratio)
    if compression != COMPRESSION:
        raise CheckpointError(
            f"{tokenizer} is that of a DV{temporal}x{spatial}x{spatial}: give the folder of "
            "Cosmos-Tokenize1-DV8x16x16-720p, which the models were trained with"
        )
    try:
        shape = (vq.num_maps(num_frames), height // spatial, width // spatial)
    except ValueError as error:
        raise CheckpointError(f"num_frames is {num_frames}: {error}") from error
    if height % spatial or width % spatial or min(height, width) < 1:
        raise CheckpointError(f"height and width are {height} and {width}: give positive multiples of {spatial}")
    transformer = cosmos_transformer_from_original(
        load_original(model_file), shape=shape, yarn=yarn, source=model_file
    )
    texts = {}
    if text_encoder is not None:
        if not transformer.reads_text:
            raise CheckpointError(f"{model_file} reads no text: leave out --text-encoder (text_encoder=)")
        texts["tokenizer"], texts["text_encoder"] = load_t5_encoder(
            Path(text_encoder), transformer.config.context_dim, model_file
        )
        texts["text_encoder"].to(transformer.dtype)
    size = (transformer.config.hidden_size, transformer.config.num_layers)
    needs = size in PUBLISHED_SHAPES
    pipeline = pipeline_of(CosmosPipeline, model_file, transformer, vq, **texts, requires_safety_checker=needs)
    pipeline.generation_config.update(TEXT_SAMPLING if transformer.reads_text else SAMPLING)
    pipeline.decoding = SpeculativeJacobiDecoding(window=128, refresh="gumbel")
    save_whole(pipeline.save_pretrained, out)
    return pipeline


def cosmos_transformer_from_original(
    state: dict[str, torch.Tensor],
    *,
    shape: tuple[int, int, int] = (5, 40, 64),
    yarn: bool | None = None,
    source: str | Path = "the checkpoint",
) -> CosmosTransformer:
    """The transformer whose tensors are `state`, by their original names, with or without "model." in front, in their
    dtype. It was trained for maps of `shape` (frames, rows, columns).

    Args:
        yarn: whether its positions are those of YaRN, which the files do not say; by default as in the published
            sizes, where those have it (40 layers) whose heads together are not as wide as the model.
    """
    weights = {key.removeprefix("model."): value for key, value in state.items() if not key.endswith("_extra_state")}
    state = OriginalTensors(weights, KIND, source)
    for part, layout in LAYOUTS.items():
        if key := next((key for key in state if part in key), None):
            raise CheckpointError(
                f"{source} has {key!r}, a name of the layout of {layout}: give the model.pt in the layout of PyTorch"
            )
    embeddings, hidden_size = state.shape("tok_embeddings.weight")
    head_dim = state.shape("layers.0.attention.q_norm.weight", 1)[0]
    layers = state.count("layers.")
    num_heads = state.shape("layers.0.attention.wq.weight")[0] // head_dim
    stretched = num_heads * head_dim != hidden_size if yarn is None else yarn
    if yarn is None and (hidden_size, layers) not in PUBLISHED_SHAPES:
        logger.warning(
            f"{source} is {hidden_size} wide with {layers} layers, unlike the published models: it is read "
            f"with{'' if stretched else 'out'} YaRN; give yarn={not stretched} if that is wrong"
        )
    text = "layers.0.cross_attention.wk.weight"
    vocab_size = state.shape("output.weight")[0]
    with torch.device("meta"):
        transformer = CosmosTransformer(
            shape=shape,
            hidden_size=hidden_size,
            intermediate_size=state.shape("layers.0.feed_forward.w1.weight")[0],
            num_layers=layers,
            num_attention_heads=num_heads,
            num_key_value_heads=state.shape("layers.0.attention.wk.weight")[0] // head_dim,
            head_dim=head_dim,
            vocab_size=vocab_size,
            context_dim=state.shape(text)[1] if text in state else None,
            embeddings=embeddings,
            yarn=stretched,
        )
    for key in state:
        if re.search(r"\.attention\.(wq|wk|q_norm|k_norm)\.weight$", key):
            # From heads whose halves turn together to heads whose neighbours do.
            halves = state[key].unflatten(0, (-1, 2, head_dim // 2))
            state[key] = halves.transpose(1, 2).flatten(0, 2).contiguous()
    dtype = state["tok_embeddings.weight"].dtype
    return state.fill(transformer, NAMES, dtype=dtype)
