"""A recipe trains an ARPG transformer in many orders, from random weights or from those of a LlamaGen pipeline."""

import copy

import numpy as np
import pytest
import torch

from arimage import ARPGPipeline, AutoPipeline, LlamaGenVQModel
from arimage.pipelines.arpg.transformer_arpg import ARPGTransformer
from arimage_emoji.training.recipe import run_transformer
from arimage_emoji.training.transformers.arpg import ARPGTask


VQ = {
    "channels": 8, "channel_multipliers": [1, 2, 2], "layers_per_block": 1, "latent_channels": 16, "codebook_size": 16,
    "codebook_dim": 4, "norm_num_groups": 4,
}  # fmt: skip
RECIPE = {
    "image_size": 16,
    "tokenizer": {"model": VQ, "optimizer": {"steps": 9, "learning_rate": 1e-3}, "training": {"codebook_start": 1}},
    "transformer": {
        "class": "ARPGTransformer",
        "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_attention_heads": 2},
        "optimizer": {"steps": 6, "learning_rate": 1e-2, "warmup_steps": 2, "muon": ["transformer.query_blocks."]},
        "training": {
            "batch_size": 8,
            "short_share": 0.5,
            "short_tokens": 8,
            "noisy_share": 0.5,
            "first_places": 3,
            "caption_length": 8,
            "text_vocab_size": 300,
            "sample_prompts": ["a red square"],
        },
    },
    "text_encoder": {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.0},
    "generation": {"sampling": {"guidance_scale": 2.0, "top_k": 10}, "decoding": {"name": "sjd-coupled", "window": 8}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory, write_pictures):
    rows = []
    for name, rgb in {"red": (220, 30, 30), "green": (20, 180, 60), "blue": (30, 60, 230)}.items():
        picture = np.full((16, 16, 3), 255, np.uint8)
        picture[3:13, 3:13] = rgb
        texts = {"caption": f"a {name} square", "captions": [f"square, {name}"]}
        rows.append({"image": picture, "name": name, **texts})
    return write_pictures(tmp_path_factory.mktemp("data") / "squares.parquet", rows)


def run(recipe, data, out, **more):
    torch.manual_seed(0)
    LlamaGenVQModel(**VQ).save_pretrained(out / "tokenizer" / "tokenizer")
    return run_transformer(recipe, data, data, out, "cpu", **more)


def test_a_recipe_trains_a_pipeline_that_takes_prompts_and_orders(data, tmp_path):
    run(RECIPE, data, tmp_path)
    pipe = AutoPipeline.from_pretrained(tmp_path / "model", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe, ARPGPipeline) and pipe.order == "farthest" and pipe.decoding.window == 8
    for order in ("raster", "farthest"):
        tokens = pipe("a red square", order=order, output_type="latent").images
        assert tokens.shape == (1, 4, 4) and 0 <= tokens.min() and tokens.max() < 16


def test_the_orders_of_a_step_have_their_shares():
    task = ARPGTask.__new__(ARPGTask)
    torch.nn.Module.__init__(task)
    task.settings = ARPGTask.settings_class(None, raster_share=0.3, farthest_share=0.2)
    task.transformer = ARPGTransformer(
        conditioning="text", hidden_size=16, intermediate_size=16, num_layers=2, num_attention_heads=2, vocab_size=4,
        caption_dim=8, num_condition_tokens=2, grid_size=4,
    )  # fmt: skip
    orders = task.orders(600, torch.Generator().manual_seed(0))
    assert torch.equal(orders.sort(dim=1).values, torch.arange(16).expand(600, -1))
    raster = (orders == torch.arange(16)).all(1)
    # The second token of a farthest order is never next to the first.
    apart = ((orders[:, 0] // 4 - orders[:, 1] // 4).abs() >= 2) | ((orders[:, 0] % 4 - orders[:, 1] % 4).abs() >= 2)
    assert raster.float().mean() == pytest.approx(0.3, abs=0.06)
    assert apart[~raster].float().mean() > 0.6 and not apart[~raster].all()


def test_first_places_are_predicted_from_the_condition_alone():
    torch.manual_seed(0)
    transformer = ARPGTransformer(
        hidden_size=16, intermediate_size=16, num_layers=2, num_attention_heads=2, vocab_size=4, grid_size=4
    )
    tokens, places, labels = torch.randint(4, (3, 16)), torch.randint(16, (3, 2)), torch.arange(3)
    for order in (None, torch.rand(3, 16).argsort(1)):
        logits = transformer.predict(tokens, order=order, first_places=places, class_labels=labels)
        torch.testing.assert_close(logits[:, :16], transformer.predict(tokens, order=order, class_labels=labels))
        for index in range(2):
            alone = transformer.predict(tokens, order=places[:, index : index + 1], class_labels=labels)
            torch.testing.assert_close(logits[:, 16 + index], alone[:, 0])


def test_the_loss_is_zero_for_the_tokens_of_the_order_and_of_the_first_places(data, tmp_path, monkeypatch):
    shapes, losses = [], []

    def perfect(self, captions, codes, unconditional, *, order, first_places):
        shapes.append(first_places.shape)
        return 1000.0 * torch.nn.functional.one_hot(codes.gather(1, torch.cat([order, first_places], dim=1)), 16)

    monkeypatch.setattr(ARPGTask, "logits", perfect)
    monkeypatch.setattr(ARPGTask, "fit", lambda task, *_, **__: losses.extend(task.loss(step)[0] for step in range(4)))
    recipe = copy.deepcopy(RECIPE)
    recipe["transformer"]["training"] |= {"noisy_share": 0.0, "code_noise": 0.0}
    run(recipe, data, tmp_path)
    assert set(shapes) == {(8, 3), (16, 3)} and not torch.stack(losses).any()
