"""Several captions per image, text encoders that are trained too, and the orders of any-order models."""

import json

import pytest
import tiny
import torch
from pipelines.arpg import tiny as tiny_arpg
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.lpd import tiny as tiny_lpd
from pipelines.var import tiny as tiny_var
from training.tokens.test_cache import class_folders, encode, parquet
from training.tokens.test_task import check_processes, check_resuming, recipe, state_of, train

from arimage import AutoPipeline


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from arimage.training.data.sources import open_source  # noqa: E402
from arimage.training.losses import losses_of  # noqa: E402
from arimage.training.orders import Orders  # noqa: E402
from arimage.training.recipe import TokenRecipe, load_recipe  # noqa: E402
from arimage.training.tokens.batches import TokenBatches  # noqa: E402
from arimage.training.tokens.beginning import begin_training, plan_of, token_settings  # noqa: E402
from arimage.training.tokens.cache import TokenCache, encode_tokens  # noqa: E402


ENCODER = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.0}
CAPTIONS = [["a filled heart", "a heart"], ["a house"], ["a thin tree", "a tree", "a plant"]] * 3
PREFIXES = {"LlamaGenPipeline": tiny_llamagen.class_pipeline, "ARPGPipeline": tiny_arpg.pipeline}
PREFIXES |= {"VARPipeline": lambda: tiny_var.pipeline("class")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of models of classes, and tokens that they made of nine images with captions."""
    root = tmp_path_factory.mktemp("made")
    parquet(root / "a.parquet", range(9), captions=CAPTIONS)
    source = open_source(str(root / "a.parquet"), caption="captions")
    for name, make in PREFIXES.items():
        pipe = make()
        pipe.save_pretrained(root / name)
        encode_tokens(source, pipe, root / f"{name}-tokens", model=str(root / name), shard_size=5)
    return root


def with_text(folder, pipeline="LlamaGenPipeline", training="", encoder=None, **settings):
    """A recipe with a text encoder."""
    lines = ["caption_length = 6", "text_vocab_size = 300", training]
    path = recipe(folder, pipeline, training="\n".join(lines), **settings)
    lines = [f"{name} = {value}" for name, value in (ENCODER if encoder is None else encoder).items()]
    with open(path, "a") as file:
        file.write("\n".join(["\n[text_encoder]", *lines]))
    return path


# Captions


def test_a_cache_keeps_all_captions_of_an_image(made):
    cache = TokenCache(made / "LlamaGenPipeline-tokens")
    assert list(cache.captions()) == [text for texts in CAPTIONS for text in texts]
    assert cache.read([0, 1, 2, 5], [0] * 4)[1] == ["a filled heart", "a house", "a thin tree", "a thin tree"]
    assert cache.read([5, 5, 5, 1], [0] * 4, [0.0, 0.4, 0.99, 0.99])[1] == [
        "a thin tree",
        "a tree",
        "a plant",
        "a house",
    ]


def test_captions_are_learned_in_their_shares(made):
    cache = TokenCache(made / "LlamaGenPipeline-tokens")
    for share in (0.2, 1.0):
        batches = TokenBatches(cache, 9, 0.0, 0, share)
        texts = [text for step in range(100) for text in batches[step].captions]
        hearts = [text for text in texts if "heart" in text]
        first = hearts.count("a filled heart") / len(hearts)
        assert first == pytest.approx(share + (1 - share) / 2, abs=0.07) and set(hearts) <= set(CAPTIONS[0])
    whole = TokenBatches(cache, 6, 0.5, seed=3)
    parts = [TokenBatches(cache, 3, 0.5, seed=3) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.rank, part.count = rank, 2
    assert [text for part in parts for text in part[1].captions] == whole[1].captions


def test_captions_of_metadata_may_be_lists(tmp_path):
    class_folders(tmp_path, ["a"], 2)
    lines = [{"file_name": "a/0.png", "text": ["one", " two\x1e "]}, {"file_name": "a/1.png", "text": "three"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    encode(tiny_llamagen.class_pipeline(), tmp_path, tmp_path.with_name("tokens"))
    assert list(TokenCache(tmp_path.with_name("tokens")).captions()) == ["one", "two", "three"]
    for text, message in (([], "has no text"), (["a", 3], "which is not a text"), (["a", " "], "empty caption")):
        (tmp_path / "metadata.jsonl").write_text(json.dumps(lines[1]) + "\n" + json.dumps({**lines[0], "text": text}))
        with pytest.raises(ValueError, match=message):
            open_source(str(tmp_path))


# Text encoders


@pytest.mark.parametrize("pipeline", PREFIXES)
def test_a_text_encoder_is_trained_with_the_transformer(made, tmp_path, pipeline):
    muon, steps = ["transformer.blocks.", "text_encoder.encoder.block."], 100 if pipeline == "ARPGPipeline" else 40
    path = with_text(
        tmp_path, pipeline, "dropout = 0.0\nprimary_share = 1.0", steps=steps, learning_rate=2e-2, muon=muon
    )
    table = load_recipe(path, TokenRecipe)
    task = begin_training(table, token_settings(table), made / f"{pipeline}-tokens", (), None, "cpu")
    before = {name: weight.clone() for name, weight in task.text_encoder.state_dict().items()}
    with torch.no_grad():
        at_first = task.report(0, tmp_path)
    task.fit(tmp_path / "run")
    with torch.no_grad():
        at_last = task.report(steps, tmp_path)
    (name,) = at_first
    assert at_last[name] < 0.9 * at_first[name]
    assert all(not torch.equal(before[name], weight) for name, weight in task.text_encoder.state_dict().items())
    pipe = AutoPipeline.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert type(pipe).__name__ == pipeline and pipe.transformer.config.num_condition_tokens == 6
    torch.testing.assert_close(
        pipe.text_encoder.shared.weight, task.text_encoder.shared.weight.float(), atol=2e-3, rtol=1e-3
    )
    # What it learned is what it generates from: the loss of the loaded pipeline is that of the report.
    cache = TokenCache(made / f"{pipeline}-tokens")
    tokens, captions = cache.read(list(range(9)), [0] * 9)
    kept = torch.zeros(9, dtype=torch.bool)
    with torch.no_grad():
        right, wrong = (
            losses_of(pipe, "a heart")(texts, tokens, kept, tokens.shape[1], torch.Generator().manual_seed(0)).mean()
            for texts in (captions, captions[1:] + captions[:1])
        )
    assert right == pytest.approx(at_last[name], rel=0.1) and wrong > right
    assert pipe("a filled heart", output_type="pt").images.isfinite().all()
    plan = plan_of(table, token_settings(table), cache)
    assert plan["trained parameters"] == plan["parameters"] == sum(one.numel() for one in task.parameters())


def test_the_text_learns_at_its_own_rate_and_the_groups_of_muon_have_its_names(made, tmp_path):
    scale, muon = "text_learning_rate_scale = 0.0", ["transformer.blocks."]
    task = train(
        with_text(tmp_path, training=scale, steps=3, muon=muon), made / "LlamaGenPipeline-tokens", tmp_path / "a"
    )
    fresh = begin_training(
        load_recipe(tmp_path / "recipe.toml", TokenRecipe),
        task.settings,
        made / "LlamaGenPipeline-tokens",
        (),
        None,
        "cpu",
    )
    same = {
        name for name, weight in fresh.state_dict().items() if torch.equal(weight, task.state_dict()[name].to(weight))
    }
    kept = {name for name in same if name.startswith(("text_encoder.", "transformer.caption_projection."))}
    assert kept and {name for name in fresh.state_dict() if name.startswith("text_encoder.")} <= kept
    assert not any(name.startswith("transformer.blocks.") for name in same)
    optimizers = state_of(tmp_path / "a")["weights"]["optimizers"]
    assert len(optimizers) == 2 and len(optimizers[1]["state"]) > 4


def test_a_run_with_text_resumes_bit_for_bit(made, tmp_path):
    path = with_text(tmp_path, "ARPGPipeline", "farthest_share = 0.5\nraster_share = 0.2\nfirst_places = 3")
    check_resuming(path, made / "ARPGPipeline-tokens", tmp_path)


@pytest.mark.slow
def test_two_processes_train_a_text_encoder_as_one(made, tmp_path):
    check_processes(with_text(tmp_path, learning_rate=1e-3), made / "LlamaGenPipeline-tokens", tmp_path)


def test_the_text_tokenizer_of_a_folder_is_taken(made, tmp_path):
    tokens, path = made / "LlamaGenPipeline-tokens", with_text(tmp_path, steps=2)
    tiny.text_tokenizer().save_pretrained(tmp_path / "words")
    table = load_recipe(path, TokenRecipe)

    def begin(folder, table=table, **more):
        return begin_training(table, token_settings(table), tokens, (), None, "cpu", text_tokenizer=folder, **more)

    pipe = begin(tmp_path / "words").frozen.pipe
    assert pipe.tokenizer.get_vocab() == tiny.text_tokenizer().get_vocab() and pipe.tokenizer.model_max_length == 6
    assert pipe.text_encoder.config.vocab_size == len(pipe.tokenizer)
    assert begin(None).frozen.pipe.tokenizer.get_vocab() != pipe.tokenizer.get_vocab()
    with pytest.raises(ValueError, match="x has no tokenizer.json"):
        begin(tmp_path / "x")
    with pytest.raises(ValueError, match="no table .text_encoder."):
        begin(tmp_path / "words", load_recipe(recipe(tmp_path), TokenRecipe))


def test_the_text_encoder_of_a_trained_model_begins(made, tmp_path):
    pipe, tokens = tiny_llamagen.text_pipeline(), made / "LlamaGenPipeline-tokens"
    pipe.save_pretrained(tmp_path / "model")
    path = with_text(tmp_path, encoder={"start_from": f'"{tmp_path / "model"}"'})
    table = load_recipe(path, TokenRecipe)
    task = begin_training(table, token_settings(table), tokens, (), None, "cpu")
    ours, theirs = task.text_encoder.state_dict(), pipe.text_encoder.state_dict()
    assert all(torch.equal(ours[name].float(), weight.to(ours[name]).float()) for name, weight in theirs.items())
    assert task.trains_text and task.frozen.pipe.tokenizer.get_vocab() == pipe.tokenizer.get_vocab()
    with pytest.raises(ValueError, match="text_encoder.start_from has its own"):
        begin_training(table, token_settings(table), tokens, (), None, "cpu", text_tokenizer=tmp_path)


def test_a_text_encoder_is_trained_further_with_its_model(made, tmp_path):
    tokens = made / "LlamaGenPipeline-tokens"
    train(with_text(tmp_path, steps=2), tokens, tmp_path / "run")
    base = str(tmp_path / "run" / "model")
    before = AutoPipeline.from_pretrained(base, dtype=torch.float32).text_encoder.state_dict()
    for folder, make in (("text", with_text), ("plain", recipe)):
        train(make(tmp_path, steps=3), tokens, tmp_path / folder, start_from=base)
        after = AutoPipeline.from_pretrained(
            tmp_path / folder / "model", dtype=torch.float32
        ).text_encoder.state_dict()
        same = all(torch.equal(before[name], weight) for name, weight in after.items())
        assert same == (folder == "plain")


def test_text_encoders_that_cannot_be_trained_are_refused(made, tmp_path):
    pipe = tiny_llamagen.class_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    encode(pipe, class_folders(tmp_path / "data"), tmp_path / "tokens", model=str(tmp_path / "model"))
    with pytest.raises(ValueError, match="the tokens have classes: leave it out"):
        train(with_text(tmp_path), tmp_path / "tokens", tmp_path / "run")
    with pytest.raises(ValueError, match="none to train: leave it out"):
        train(with_text(tmp_path), tmp_path / "tokens", tmp_path / "run", start_from=str(tmp_path / "model"))
    with pytest.raises(ValueError, match="has no text encoder: add a table .text_encoder."):
        train(recipe(tmp_path), made / "LlamaGenPipeline-tokens", tmp_path / "run")
    with pytest.raises(ValueError, match="text_encoder.d_model"):
        train(with_text(tmp_path, encoder={"d_model": 0}), made / "LlamaGenPipeline-tokens", tmp_path / "run")


# Orders


def test_orders_have_their_shares():
    orders = Orders(raster_share=0.3, farthest_share=0.2).sample(600, 4, torch.Generator().manual_seed(0))
    assert torch.equal(orders.sort(dim=1).values, torch.arange(16).expand(600, -1))
    assert (orders == torch.arange(16)).all(1).float().mean() == pytest.approx(0.3, abs=0.06)
    with pytest.raises(ValueError, match="raster_share and farthest_share are more than 1 together"):
        Orders(0.6, 0.6)


def test_an_any_order_model_learns_the_orders_and_first_places(monkeypatch):
    pipe, asked = tiny_arpg.pipeline(), []
    tokens = torch.randint(tiny.CODES, (6, 16))

    def perfect(tokens, *, order, first_places=None, **condition):
        asked.append((order, first_places))
        every = order if first_places is None else torch.cat([order, first_places], 1)
        return 1000.0 * torch.nn.functional.one_hot(tokens.gather(1, every), tiny.CODES)

    monkeypatch.setattr(pipe.transformer, "predict", perfect)
    given = ["1"] * 6, tokens, torch.zeros(6, dtype=torch.bool), 16, torch.Generator().manual_seed(0)
    found = losses_of(pipe, "1", orders=Orders(1.0, 0.0, first_places=3))(*given)
    assert found.shape == (6, 19) and not found.any()
    assert (asked[0][0] == torch.arange(16)).all() and asked[0][1].shape == (6, 3)
    found = losses_of(pipe, "1")(*given)
    assert found.shape == (6, 16) and not found.any() and asked[1][1] is None


def test_settings_of_orders_that_a_model_does_not_have_are_refused(made, tmp_path):
    for setting in ("farthest_share = 0.5", "first_places = 2"):
        with pytest.raises(ValueError, match="LlamaGenPipeline has one order: leave it out"):
            train(with_text(tmp_path, training=setting), made / "LlamaGenPipeline-tokens", tmp_path / "run")
    with pytest.raises(ValueError, match="first_places is given, and a LPDPipeline"):
        losses_of(tiny_lpd.pipeline(), "1", orders=Orders(first_places=2))
    with pytest.raises(ValueError, match="more than 1 together"):
        token_settings(load_recipe(recipe(tmp_path, training="farthest_share = 0.8\nraster_share = 0.3"), TokenRecipe))


def test_reports_are_in_the_order_in_which_images_are_generated(made, tmp_path):
    for training, farthest in (("farthest_share = 0.5", 1.0), ("raster_share = 0.5", 0.0)):
        path = with_text(tmp_path, "ARPGPipeline", training + "\nfirst_places = 2")
        table = load_recipe(path, TokenRecipe)
        task = begin_training(table, token_settings(table), made / "ARPGPipeline-tokens", (), None, "cpu")
        assert task.frozen.judge.orders == Orders(farthest_share=farthest)
