"""The metric `videos`: whether a video shows the emoji of its prompt, moving as asked and without falling apart.

No network is involved: the object is what differs from the plain background, and the rest is geometry.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from arimage.eval.metrics.features import image_paths
from arimage.eval.runs.run_folder import read_rows
from arimage.media.files import read_video

from .composition import SIZE, foreground
from .motions import motions_in


# The side of the pictures that are compared, and half of it in units of the object's size (`ObjectTrack.sizes`).
SIDE, EXTENT = 32, 2.0
# The angles from one frame to the next among which the best is chosen, in degrees.
ANGLES = tuple(range(-180, 180, 15))
# What counts as motion: a share of the frame's side, a logarithm of the size over the video, and degrees per frame.
MOVED, GROWN, TURNED = 0.18, 0.3, (20, 160)
# A video has collapsed unless its object covers a share of the frame within these limits and changes at most this much
# (mean difference of colours in [0, 1]).
COVERS, CHANGES = (0.005, 0.9), 0.1


class ObjectTrack:
    """The object of a video, frame by frame.

    Args:
        frames: uint8 [T, 3, S, S], T of at least 2.

    Attributes:
        visible: bool [T], whether there is an object.
        places: float [T, 2], the centre of the object from left and top, as shares of the side.
        sizes: float [T], the root mean square distance of its pixels from the centre, as a share of the side.
    """

    def __init__(self, frames: torch.Tensor):
        self.mask = foreground(frames)
        self.frames, side = frames, frames.shape[-1]
        area = self.mask.flatten(1).float().mean(1)
        self.visible = (area >= COVERS[0]) & (area <= COVERS[1])
        weights = self.mask.float() / self.mask.flatten(1).sum(1).clamp(min=1)[:, None, None]
        centres = (torch.arange(side, dtype=torch.float32) + 0.5) / side
        right, down = (weights * centres).sum((1, 2)), (weights * centres[:, None]).sum((1, 2))
        self.places = torch.stack([right, down], dim=1)
        distances = (centres - right[:, None, None]) ** 2 + (centres[:, None] - down[:, None, None]) ** 2
        self.sizes = (weights * distances).sum((1, 2)).sqrt().clamp(min=1 / side)

    def pictures(self, angles: torch.Tensor) -> torch.Tensor:
        """The object alone on white, centred, scaled to one size and turned back by `angles` [T] in degrees clockwise:
        float [T, 3, 32, 32] in [0, 1]."""
        turned = angles.float().deg2rad()
        scale = 2 * EXTENT * self.sizes
        cos, sin = turned.cos() * scale, turned.sin() * scale
        matrix = torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2)
        grid = F.affine_grid(
            torch.cat([matrix, (2 * self.places - 1)[..., None]], dim=2),
            [len(turned), 3, SIDE, SIDE],
            align_corners=False,
        )
        ink = (255 - self.frames.float()) * self.mask[:, None] / 255
        return 1 - F.grid_sample(ink, grid, align_corners=False)

    @cached_property
    def turn(self) -> int:
        """Degrees clockwise from one frame to the next: the one of `ANGLES` that explains the video best."""
        before = self.pictures(torch.zeros(len(self.frames), dtype=torch.float32))[:-1]
        angles = torch.tensor(ANGLES, dtype=torch.float32)[:, None].expand(-1, len(self.frames))
        errors = [float((self.pictures(angle)[1:] - before).abs().mean()) for angle in angles]
        return ANGLES[int(np.argmin(errors))]

    @cached_property
    def upright(self) -> torch.Tensor:
        """The `pictures` of all frames, turned back to the first."""
        return self.pictures(self.turn * torch.arange(len(self.frames)))

    def motions(self) -> set[str]:
        """The motions of `MOTIONS` that the video shows; none if the object is missing in a frame."""
        if not self.visible.all():
            return set()
        (right, down), grown = trend(self.places), trend(self.sizes.log()[:, None])[0]
        found = set()
        if turning_points(self.places[:, 1]) >= 2:
            found.add("bouncing")
            down = torch.zeros((), dtype=torch.float32)
        for value, least, names in (
            (right, MOVED, ("right", "left")), (down, MOVED, ("down", "up")), (grown, GROWN, ("growing", "shrinking")),
        ):  # fmt: skip
            if value.abs() > least:
                found.add(names[int(value < 0)])
        if TURNED[0] <= abs(self.turn) <= TURNED[1]:
            found.add("spinning")
        return found

    def change(self) -> float:
        """The mean difference of colours in [0, 1] between the object in the first frame and in the frame that differs
        most from it."""
        return float((self.upright - self.upright[:1]).abs().mean((1, 2, 3)).max())

    def collapsed(self) -> bool:
        """Whether the object disappears, fills the frame or turns into another one."""
        return not bool(self.visible.all()) or self.change() > CHANGES


def trend(values: torch.Tensor) -> torch.Tensor:
    """The change of values [T, D] from the first to the last along the straight line that fits them best: [D]."""
    time = torch.arange(len(values)) - (len(values) - 1) / 2
    return (time[:, None] * values).sum(0) / time.square().sum() * (len(values) - 1)


def turning_points(values: torch.Tensor) -> int:
    """How often values [T] reverse their direction by more than `MOVED`."""
    turns, extreme, direction = 0, values[0], 0
    for value in values[1:]:
        step = value - extreme
        if direction == 0 and step.abs() > MOVED:
            direction, extreme = (1 if step > 0 else -1), value
        elif direction * step > 0:
            extreme = value
        elif direction * step < -MOVED:
            turns, direction, extreme = turns + 1, -direction, value
    return turns


def gallery_pictures(gallery: torch.Tensor) -> torch.Tensor:
    """The pictures of a gallery on white, [K, 3, S, S] in [0, 1], as `ObjectTrack.pictures` returns them: float
    [K, 3, 32, 32] in [0, 1]."""
    return ObjectTrack((gallery * 255).round().byte()).pictures(torch.zeros(len(gallery), dtype=torch.float32))


def check_video(
    frames: torch.Tensor, prompt: str, name: str, gallery: torch.Tensor, gallery_names: list[str]
) -> dict[str, float]:
    """The scores of one video.

    Args:
        frames: uint8 [T, 3, S, S].
        prompt, name: what the video should show, and the name of its emoji.
        gallery: as `gallery_pictures` returns it.
        gallery_names: the name of each picture of the gallery.

    Returns:
        video-retrieval: the share of frames for which a picture with `name` is among the five nearest of the gallery.
        video-motion: whether the video moves as `prompt` asks, and in no other way.
        video-change: how much the object changes, in [0, 1], see `ObjectTrack.change`.
        video-collapse: whether the object disappears, fills the frame or turns into another one.
    """
    track = ObjectTrack(frames)
    nearest = torch.cdist(track.upright.flatten(1), gallery.flatten(1)).topk(5, largest=False).indices
    shown = [any(gallery_names[i] == name for i in row) for row in nearest.tolist()]
    return {
        "video-retrieval": float(np.mean(shown)),
        "video-motion": float(track.motions() == set(motions_in(prompt))),
        "video-change": track.change(),
        "video-collapse": float(track.collapsed()),
    }


def check_run(run: Path, gallery: torch.Tensor, names: list[str]) -> list[dict[str, float]]:
    """The scores of `check_video` for the videos of a run with the prompts `emoji-videos`, in manifest order.

    Args:
        gallery, names: as `reference.read_gallery` returns them.

    Raises:
        ValueError: if the run holds images, or a row of the manifest asks for no motion or for an unknown emoji.
    """
    pictures, scores = gallery_pictures(gallery), []
    for row, path in zip(read_rows(run), image_paths(run), strict=True):
        name = row.get("metadata", {}).get("name")
        if name not in names or not motions_in(row.get("prompt", "")):
            raise ValueError(
                f"image {row['id']} of {run} asks for {row.get('prompt')!r} of {name!r}: generate with --prompts "
                "emoji-videos"
            )
        found = read_video("one of the videos", path)
        frames = [np.array(frame.resize((SIZE, SIZE), Image.Resampling.BOX)) for frame in found]
        if len(frames) < 2:
            raise ValueError(f"{path} is an image: video scores need a run of a model that generates videos")
        scores.append(
            check_video(torch.from_numpy(np.stack(frames)).movedim(-1, 1), row["prompt"], name, pictures, names)
        )
    return scores
