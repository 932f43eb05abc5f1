"""The videos of a server: jobs in memory, which threads do one after another."""

import logging
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from PIL import Image

from ...media.writing import grid_of, write_video
from ..engine.models import ModelInfo
from ..engine.types import Limits, Refused, Unavailable
from ..engine.uploads import asked_size
from ..engine.videos import VideoProgress, VideoRequest


logger = logging.getLogger(__name__)

# How many jobs are kept, and for how many seconds after their end; and how many may wait, in all and per client.
KEPT_JOBS, KEPT_SECONDS = 32, 3600
WAITING, WAITING_OF_CLIENT = 16, 8
# The largest number of frames of a sheet.
SHEET = 16


@dataclass
class Job:
    """A video that was asked for.

    Attributes:
        client: who asked; nobody else sees it in a list.
        status: "queued", "in_progress", "completed" or "failed".
        progress: how much of it is done, 0 to 100.
        facts: what the answer says under "arimage".
        files: the paths of the video, a thumbnail and a sheet of its frames, by name. They exist as long as the job
            itself, also while a deleted one is still being sent.
        fetched: how many bytes from the beginning of the video were downloaded.
        deleted: whether the client has deleted it.
    """

    request: VideoRequest
    client: str
    size: tuple[int, int]
    frames: int
    fps: int
    id: str = field(default_factory=lambda: f"video_{secrets.token_urlsafe(24)}")
    created: float = field(default_factory=time.time)
    status: str = "queued"
    progress: int = 0
    ended: float | None = None
    error: Exception | None = None
    facts: dict = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    fetched: int = 0
    deleted: bool = False

    @property
    def unfinished(self) -> bool:
        return self.status in ("queued", "in_progress")

    @property
    def downloaded(self) -> bool:
        return self.status == "completed" and self.fetched >= self.files["video"].stat().st_size


class Videos(Protocol):
    """Generates videos, see `VideoMaker`."""

    models: dict[str, ModelInfo]
    limits: Limits

    @property
    def at_a_time(self) -> int: ...

    def check(self, request: VideoRequest) -> None: ...

    def run(self, request: VideoRequest) -> Generator[VideoProgress, None, None]: ...


class VideoJobs:
    """Generates videos in turn, as many at a time as `maker` does.

    Attributes:
        models: the abilities of the models, by name.
        limits: which requests are accepted.
        on_end: called in another thread with the status, "deleted" too, and the model of a job whose generation has
            ended, and the seconds since it was asked for.
    """

    def __init__(self, maker: Videos):
        self.models, self.limits = maker.models, maker.limits
        self.on_end: Callable[[str, str, float], None] = lambda status, model, seconds: None
        self._maker, self._changed, self._closed = maker, threading.Condition(), False
        # The oldest first.
        self._jobs: dict[str, Job] = {}
        # The jobs that a draining server finishes.
        self._last: list[Job] = []
        # Daemon threads: a second signal ends the process without waiting for a video.
        self._workers = [
            threading.Thread(target=self._work, name="arimage-videos", daemon=True) for _ in range(maker.at_a_time)
        ]
        for worker in self._workers:
            worker.start()

    def add(self, request: VideoRequest, client: str) -> Job:
        """Queue a video.

        Raises:
            Refused: if the model does not support it, the limits do not allow it, or too many wait (`busy`).
        """
        self._maker.check(request)
        info = self.models[request.model]
        size = asked_size(request, info.sizes[0])
        job = Job(request, client, size, request.num_frames or info.frame_counts[0], info.fps)
        with self._changed:
            self._forget()
            waiting = [job for job in self._jobs.values() if job.unfinished]
            if len(waiting) >= WAITING or sum(one.client == client for one in waiting) >= WAITING_OF_CLIENT:
                raise Refused(f"{len(waiting)} videos are waiting already: try again later", busy=True)
            self._jobs[job.id] = job
            self._changed.notify()
        return job

    def get(self, name: str) -> Job | None:
        with self._changed:
            self._forget()
            return self._jobs.get(name)

    def of(self, client: str) -> list[Job]:
        """The jobs of a client, the oldest first."""
        with self._changed:
            self._forget()
            return [job for job in self._jobs.values() if job.client == client]

    def delete(self, job: Job) -> None:
        """Forget a job, and end it after the current forward pass."""
        with self._changed:
            job.deleted = True
            self._jobs.pop(job.id, None)

    @property
    def unfinished(self) -> int:
        """The number of jobs that wait or are being done."""
        with self._changed:
            return sum(job.unfinished for job in self._jobs.values())

    @property
    def busy(self) -> bool:
        """Whether a video that was asked for before `drain` is neither downloaded, failed nor deleted."""
        return any(not (job.deleted or job.downloaded or job.status == "failed") for job in self._last)

    def drain(self) -> None:
        with self._changed:
            self._last = [job for job in self._jobs.values() if job.unfinished]

    def close(self) -> None:
        """End all jobs after the current forward pass."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            jobs = list(self._jobs.values())
        for job in jobs:
            self.delete(job)
        for worker in self._workers:
            worker.join()

    def _forget(self) -> None:
        """Remove the jobs that have expired, and the oldest finished ones beyond the limit."""
        done = [job for job in self._jobs.values() if not job.unfinished]
        surplus = len(self._jobs) - KEPT_JOBS
        for place, job in enumerate(done):
            if place < surplus or time.time() > (job.ended or 0) + KEPT_SECONDS:
                del self._jobs[job.id]

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            # The files of a job go with the last reference to it.
            del job

    def _next(self) -> Job | None:
        """Wait for the first queued job, and begin it; None once they are closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queued)
            if self._closed:
                return None
            job = self._queued[0]
            job.status = "in_progress"
            return job

    @property
    def _queued(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.status == "queued"]

    def _run(self, job: Job) -> None:
        status = "failed"
        try:
            last = None
            with closing(self._maker.run(job.request)) as steps:
                for last in steps:
                    if job.deleted:
                        return
                    job.progress = min(99, int(100 * last.work))
            assert last is not None and last.finished is not None
            decoding, exact = last.finished
            job.facts = {"passes": last.passes, "decoding": decoding, "exact": exact, "seconds": last.seconds}
            job.files = _files(job, last.frames, last.note if self.limits.metadata else None)
            status, job.progress = "completed", 100
        # The job tells the client.
        except Exception as error:
            # The client is referred to the log for these.
            if not isinstance(error, Refused | Unavailable):
                logger.exception("a video of %s failed", job.request.model)
            job.error = error
        finally:
            # A job is kept for long after its end, without its first frame.
            job.request, job.ended = replace(job.request, image=None), time.time()
            # Last: who sees it sees all else.
            job.status = status
            self.on_end("deleted" if job.deleted else status, job.request.model, job.ended - job.created)


def _files(job: Job, frames: list[Image.Image], text: str | None) -> dict[str, Path]:
    folder = Path(tempfile.mkdtemp(prefix="arimage-video-"))
    weakref.finalize(job, shutil.rmtree, folder, ignore_errors=True)
    names = {"video": "video.mp4", "thumbnail": "thumbnail.webp", "spritesheet": "spritesheet.jpg"}
    files = {name: folder / file for name, file in names.items()}
    write_video(frames, files["video"], job.fps, text)
    count = min(len(frames), SHEET)
    shown = [frames[place * len(frames) // count] for place in range(count)]
    rows = next(rows for rows in range(int(count**0.5), 0, -1) if count % rows == 0)
    frames[0].save(files["thumbnail"])
    grid_of(shown, rows).save(files["spritesheet"])
    return files
