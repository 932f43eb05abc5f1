"""Data sets of videos, the cache of their tokens, and training of Cosmos on it."""

import io
import json
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pipelines.cosmos import tiny
from training.tokens.test_cache import picture
from training.tokens.test_task import FIGURE, check_processes, check_resuming, losses_in, recipe, train

from arimage import AutoPipeline
from arimage.cli import main as cli
from arimage.media.files import can_write_mp4, read_clip
from arimage.media.writing import write_video


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from arimage.training.data.row import decode, decode_clip  # noqa: E402
from arimage.training.data.sources import open_source  # noqa: E402
from arimage.training.losses import losses_of  # noqa: E402
from arimage.training.recipe import TokenRecipe, load_recipe  # noqa: E402
from arimage.training.tokens import rows  # noqa: E402
from arimage.training.tokens.augmentation import Augmentation  # noqa: E402
from arimage.training.tokens.beginning import plan_of, token_settings  # noqa: E402
from arimage.training.tokens.cache import TokenCache, encode_tokens, read_index  # noqa: E402
from arimage.training.tokens.views import views_of  # noqa: E402


needs_mp4 = pytest.mark.skipif(not can_write_mp4(), reason="needs arimage[video]")
FPS, FRAMES, TOKENS = 8, tiny.FRAMES, 36
DECODER = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_attention_heads": 4}
DECODER |= {"num_key_value_heads": 2, "head_dim": 12}


def film(number, count=FRAMES):
    """Frames with a bright column at a place of its own, whose mean level rises by 10."""
    levels = np.asarray(picture(number, 80, 56)) // 8
    levels[:, 8 * number : 8 * number + 16] += 60
    return [Image.fromarray((levels + 10 * i).astype(np.uint8)) for i in range(count)]


def clips(folder, count=5, suffix=".webp"):
    folder.mkdir(parents=True)
    for i in range(count):
        write_video(film(i), folder / f"{i}{suffix}", FPS)
    lines = [{"file_name": f"{i}{suffix}", "text": f"film {i}"} for i in range(count)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def text_pipeline(**changes):
    return tiny.pipeline("text", begins_with_text=True, fps=FPS, **changes)


def encode(pipe, data, out, captions=True, **settings):
    source = open_source(str(data), videos=True, captions=captions)
    return encode_tokens(source, pipe, out, **{"model": "tiny", "shard_size": 2, "batch_size": 40, **settings})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model that generates from text, one with blocks, one that continues videos, and the tokens of each."""
    root = tmp_path_factory.mktemp("clips")
    data = clips(root / "data")
    pipes = {"text": text_pipeline(), "blocks": text_pipeline(block_tokens=4), "video": tiny.pipeline(fps=FPS)}
    for name, pipe in pipes.items():
        pipe.save_pretrained(root / name)
        encode(pipe, data, root / f"{name}-tokens", captions=name != "video", model=str(root / name))
    return root


def levels_of(frames):
    """How many tens the mean level of each frame is above that of the first frame of its film."""
    means = [float(np.asarray(frame).mean()) for frame in frames]
    return [round((mean - float(np.asarray(film(0, 1)[0]).mean())) / 10) for mean in means]


# Data sets


@pytest.mark.slow
def test_frames_are_those_of_the_rate_that_is_asked_for(tmp_path):
    for suffix in (".webp", ".gif", *([".mp4"] if can_write_mp4() else [])):
        path = tmp_path / f"film{suffix}"
        for rate, expected in ((FPS, [0, 1, 2, 3]), (2 * FPS, [1, 3, 5, 7]), (FPS // 2, [0, 0, 1, 1])):
            # The frames of ffmpeg, which starts slowly, are taken as those of other files.
            if suffix == ".mp4" and rate != 2 * FPS:
                continue
            write_video(film(0, 9), path, rate)
            for source in (path, path.read_bytes()):
                assert levels_of(read_clip("clip", source, 4, FPS)) == expected, (suffix, rate)
            assert len(read_clip("clip", path, 100, rate)) == 9
    with pytest.raises(ValueError, match="row 3 cannot be read"):
        read_clip("row 3", path.read_bytes()[:300], 4, FPS)


def test_shards_of_videos_in_order(tmp_path):
    contents = [path.read_bytes() for path in sorted(clips(tmp_path / "data", 4).glob("*.webp"))]
    texts = [f"film {i}" for i in range(4)]
    videos = [{"bytes": content, "path": None} for content in contents]
    (tmp_path / "parquet").mkdir()
    for name, column in (("structs", pa.array(videos)), ("bytes", pa.array(contents))):
        pq.write_table(pa.table({"video": column, "caption": texts}), tmp_path / "parquet" / f"{name}.parquet")
    (tmp_path / "tar").mkdir()
    with tarfile.open(tmp_path / "tar" / "0.tar", "w") as tar:
        for i, content in enumerate(contents):
            for name, data in ((f"{i}.webp", content), (f"{i}.txt", texts[i].encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    for data in ("data", "parquet/structs.parquet", "parquet/bytes.parquet", "tar"):
        source = open_source(str(tmp_path / data), videos=True)
        found = [(decode_clip(where, video, 3, FPS), text) for where, video, text in source.read(1)]
        assert not source.labelled and [text for _, text in found] == texts[1:]
        assert np.array_equal(np.asarray(found[0][0][2]), np.asarray(read_clip("", contents[1], 3, FPS)[2]))
    silent = open_source(str(tmp_path / "tar"), videos=True, captions=False)
    assert [text for _, _, text in silent.read()] == [""] * 4


def test_odd_data_sets_are_refused(tmp_path):
    data = clips(tmp_path / "data", 1)
    for given, message in (
        ({"label": "text"}, "models of videos read captions"),
        ({"image": "clip"}, "--video names a column"),
        ({"caption": "prompt"}, "name that of its captions with --caption"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(str(data), videos=True, **given)


def test_files_of_a_remote_repository_are_read():
    fsspec = pytest.importorskip("fsspec")
    file = io.BytesIO()
    picture().save(file, "PNG")
    with fsspec.open("memory://repository/0.png", "wb") as opened:
        opened.write(file.getvalue())
    row = {"bytes": None, "path": "memory://repository/0.png"}
    assert decode("row 1", row).tobytes() == picture().tobytes()
    assert len(decode_clip("row 1", row, 4, FPS)) == 1


# The cache


def test_the_tokens_are_those_of_the_views(made, tmp_path):
    pipe, views = text_pipeline(), "centre-flip"
    index = encode(pipe, made / "data", tmp_path / "tokens", views=views)
    cache = TokenCache(tmp_path / "tokens")
    assert len(cache) == index.rows == 5 and index.shape == (TOKENS,) and [s.count for s in index.shards] == [2, 2, 1]
    assert index.about["image_size"] == [48, 64] and (index.about["frames"], index.about["fps"]) == (FRAMES, FPS)
    frames = read_clip("", made / "data" / "3.webp", FRAMES, FPS)
    both = torch.stack([views_of(frame, tiny.SIZE, views) for frame in frames], 2).float() / 127.5 - 1
    assert both.shape == (2, 3, FRAMES, *tiny.SIZE)
    with torch.no_grad():
        expected = pipe.vq.encode(both).flatten(1)
    for view in range(2):
        tokens, texts = cache.read([3], [view])
        assert texts == ["film 3"] and (tokens[0] != expected[view]).float().mean() < 0.1
    assert (expected[0] != expected[1]).float().mean() > 0.3


def test_copies_of_a_clip_are_encoded(made, tmp_path):
    encode(text_pipeline(), made / "data", tmp_path / "tokens", augmentation=Augmentation(3, shift=8))
    cache, plain = TokenCache(tmp_path / "tokens"), TokenCache(made / "text-tokens")
    views = [cache.read([2], [view])[0] for view in range(3)]
    assert cache.views == 3 and (views[0] != plain.read([2], [0])[0]).float().mean() < 0.1
    assert (views[1] != views[0]).float().mean() > 0.1 or (views[2] != views[0]).float().mean() > 0.1


def test_short_videos_are_left_out_and_an_interrupted_encoding_goes_on(tmp_path, monkeypatch, caplog):
    pipe, data = text_pipeline(), clips(tmp_path / "data", 7)
    for i in (1, 4, 5):
        write_video(film(i, FRAMES - 1), data / f"{i}.webp", FPS)
    index = encode(pipe, data, tmp_path / "whole")
    assert index.rows == 7 and [shard.count for shard in index.shards] == [1, 2, 1]
    assert f"row 5 (4.webp), has 16 frames of {FPS} per second, not 17" in caplog.text
    assert TokenCache(tmp_path / "whole").read(list(range(4)), [0] * 4)[1] == [f"film {i}" for i in (0, 2, 3, 6)]
    seen, plain = [], rows.decode_clip

    def stops(where, *rest):
        seen.append(where)
        if seen[0] != "again" and ", row 6" in where:
            raise KeyboardInterrupt
        return plain(where, *rest)

    monkeypatch.setattr(rows, "decode_clip", stops)
    with pytest.raises(KeyboardInterrupt):
        encode(pipe, data, tmp_path / "cut")
    done = read_index(tmp_path / "cut").rows
    assert 0 < done < 6
    seen[:] = ["again"] * 10
    encode(pipe, data, tmp_path / "cut")
    assert len(seen) == 10 + 7 - done
    assert TokenCache(tmp_path / "cut").digest == TokenCache(tmp_path / "whole").digest
    for i in range(7):
        write_video(film(i, 3), data / f"{i}.webp", FPS)
    with pytest.raises(ValueError, match="has no clips of 17 frames"):
        encode(pipe, data, tmp_path / "none")


def test_frames_are_encoded_a_batch_at_a_time(made, tmp_path, monkeypatch):
    pipe, sizes = text_pipeline(), []
    encoded = pipe.vq.encode
    monkeypatch.setattr(pipe.vq, "encode", lambda pixels: sizes.append(len(pixels)) or encoded(pixels))
    encode(pipe, made / "data", tmp_path / "tokens", shard_size=100, batch_size=40)
    assert sizes == [2, 2, 1]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_videos(made, tmp_path, monkeypatch):
    import psutil

    pipe, sizes, content = text_pipeline(), [], (made / "data" / "0.webp").read_bytes()
    table = pa.table({"video": [content] * 300, "caption": ["a film"] * 300})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)

    def measured(pixels):
        sizes.append(psutil.Process().memory_info().rss / 2**20)
        return torch.zeros(len(pixels), *tiny.SHAPE, dtype=torch.long)

    monkeypatch.setattr(pipe.vq, "encode", measured)
    encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens", shard_size=300, views="ten-crop", batch_size=170)
    assert len(sizes) == 300
    print(f"{sizes[30]:.0f} MB after 30 videos, {sizes[-1]:.0f} after 300")
    # Their ten views have 470 MB of pixels.
    assert max(sizes[30:]) < sizes[30] + 64


# Training


def losses_before(path, tokens, folder, start_from=None):
    from arimage.training.tokens.beginning import begin_training

    table = load_recipe(path, TokenRecipe)
    task = begin_training(table, token_settings(table), tokens, (), start_from, "cpu")
    with torch.no_grad():
        return task.report(0, folder)[FIGURE]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [pytest.param("text", marks=pytest.mark.slow), "blocks", "video"])
def test_clips_are_learned_from_random_weights(made, tmp_path, name):
    model = DECODER | ({"block_tokens": 4} if name == "blocks" else {})
    path = recipe(tmp_path, "CosmosPipeline", model, steps=16, learning_rate=2e-2)
    task = train(path, made / f"{name}-tokens", tmp_path / "run", dropout=0.0)
    assert task.held_out.startswith("videos to train on: 5")
    assert losses_in(tmp_path / "run")[-1] < 0.8 * losses_before(path, made / f"{name}-tokens", tmp_path)
    trained = AutoPipeline.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert trained.begins_with_text == (name != "video") and trained.config.fps == FPS
    assert tuple(trained.transformer.config.shape) == tiny.SHAPE
    given = {"image": film(0)[0]} if name == "video" else {"prompt": "film 2"}
    assert trained(**given, output_type="pt").frames.shape == (1, FRAMES, 3, *tiny.SIZE)
    # A row of frames per video.
    assert Image.open(tmp_path / "run" / "transformer" / "samples.png").size == (64 * FRAMES, 48 * 5)


def test_dropped_captions_read_zeros(made):
    pipe = text_pipeline()
    losses, generator = losses_of(pipe, "film"), torch.Generator()
    tokens, _ = TokenCache(made / "text-tokens").read([0, 0], [0, 0])
    with torch.no_grad():
        one, two = (losses(["film 0", text], tokens, torch.tensor([False, True]), TOKENS, generator) for text in "ab")
        logits = pipe.transformer.predict(tokens[1:].unflatten(1, tiny.SHAPE), torch.zeros(1, 12, 16))
    assert torch.equal(one, two) and one.shape == (2, TOKENS) and not torch.equal(one[0], one[1])
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[1], reduction="none")
    torch.testing.assert_close(one[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("base", 2),
        ("video2world", 0),
        pytest.param("base", 0, marks=pytest.mark.slow),
        pytest.param("video2world", 2, marks=pytest.mark.slow),
    ],
)
def test_published_files_are_trained_further(made, tmp_path, name, rank):
    if rank:
        pytest.importorskip("peft", reason="the extra `lora` is not installed")
    pipe = tiny.golden_pipeline(name)
    pipe.register_to_config(fps=FPS)
    reads = pipe.transformer.reads_text
    if reads:
        text = text_pipeline()
        width = pipe.transformer.config.context_dim
        encoder = tiny.tiny.text_encoder(len(text.tokenizer), width)
        pipe = type(pipe)(pipe.transformer, pipe.vq, text.tokenizer, encoder, fps=FPS)
    pipe.save_pretrained(tmp_path / "model")
    encode(pipe, made / "data", tmp_path / "tokens", captions=reads, model=str(tmp_path / "model"))
    path = recipe(tmp_path, "CosmosPipeline", {}, steps=3, learning_rate=1e-3)
    train(path, tmp_path / "tokens", tmp_path / "run", start_from=str(tmp_path / "model"), lora_rank=rank)
    before = pipe.transformer.state_dict()
    if rank:
        changed = AutoPipeline.from_pretrained(tmp_path / "model", dtype=torch.float32)
        changed.load_lora_weights(tmp_path / "run" / "adapter")
        assert any(w.abs().max() > 0 for key, w in changed.transformer.named_parameters() if "lora_B" in key)
    else:
        changed = AutoPipeline.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
        after = changed.transformer.state_dict()
        assert any(not torch.equal(after[key], before[key].half().float()) for key in before)
    given = {"prompt": "film 1"} if reads else {}
    assert changed(image=film(1)[0], **given, output_type="pt").frames.isfinite().all()


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(made, tmp_path):
    check_resuming(recipe(tmp_path, "CosmosPipeline", DECODER, steps=8), made / "text-tokens", tmp_path)


@pytest.mark.slow
def test_two_processes_train_as_one(made, tmp_path):
    path = recipe(tmp_path, "CosmosPipeline", DECODER, learning_rate=1e-3)
    check_processes(path, made / "text-tokens", tmp_path)


def test_the_plan_counts_clips(made, tmp_path):
    table = load_recipe(recipe(tmp_path, "CosmosPipeline", DECODER), TokenRecipe)
    plan = plan_of(table, token_settings(table), TokenCache(made / "text-tokens"))
    parameters = sum(weight.numel() for weight in tiny.transformer("text").parameters())
    assert plan["parameters"] == plan["trained parameters"] == parameters
    assert (plan["clips"], plan["tokens per clip"], plan["clips per step and process"]) == (5, TOKENS, 4)
    assert plan["FLOP"] == 6 * parameters * 48 * TOKENS


def test_tokens_of_another_kind_are_refused(made, tmp_path):
    path = recipe(tmp_path, "CosmosPipeline", DECODER)
    with pytest.raises(ValueError, match="tokens are of videos, and a LlamaGenPipeline generates images"):
        train(recipe(tmp_path, "LlamaGenPipeline", {}), made / "text-tokens", tmp_path / "run")
    with pytest.raises(ValueError, match="have no captions, and the model to start from needs them"):
        train(path, made / "video-tokens", tmp_path / "run", start_from=str(made / "text"))
    encode(text_pipeline(), made / "data", tmp_path / "small", size=32)
    with pytest.raises(ValueError, match=r"maps of \(3, 2, 2\), and the model to start from \(3, 3, 4\)"):
        train(path, tmp_path / "small", tmp_path / "run", start_from=str(made / "text"))


@pytest.mark.slow
@needs_mp4
def test_the_commands(made, tmp_path, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return end.value.code, printed.out.strip(), printed.err

    data = clips(tmp_path / "data", 3, ".mp4")
    write_video(film(9, 4), data / "1.mp4", FPS)
    words = ["--model", made / "text", "--views", "centre-flip", "--out", tmp_path / "tokens", "--device", "cpu"]
    code, out, _ = run("train", "tokens", "--data", data, *words)
    assert not code and out.endswith(": 2 videos, 36 tokens each, in 1 files, 1 were too short")
    words = ["--tokens", tmp_path / "tokens", "--recipe", recipe(tmp_path, "CosmosPipeline", DECODER)]
    words += ["--steps", 4, "--out", tmp_path / "run", "--device", "cpu"]
    code, out, _ = run("train", "model", *words, "--dry-run")
    assert not code and "clips: 2\ntokens per clip: 36" in out
    assert not run("train", "model", *words)[0]
    words = ["--model", tmp_path / "run" / "model", "--out", tmp_path / "film.gif", "--device", "cpu"]
    assert not run("generate", "film 2", *words)[0]
    assert len(read_clip("", tmp_path / "film.gif", 100, FPS)) == FRAMES
    code, _, err = run("train", "lora", "--data", data, "--model", made / "text", "--out", tmp_path / "lora")
    assert code == 2 and "generates videos, and this command takes pictures: use `arimage train tokens`" in err
    (data / "metadata.jsonl").unlink()
    code, _, err = run("train", "tokens", "--data", data, "--model", made / "text", "--out", tmp_path / "x")
    assert code == 2 and "has videos without captions: add a metadata.jsonl" in err
    words = ["--model", made / "video", "--out", tmp_path / "silent", "--device", "cpu"]
    assert run("train", "tokens", "--data", data, *words)[1].endswith(
        "2 videos, 36 tokens each, in 1 files, 1 were too short"
    )
