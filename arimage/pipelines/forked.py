"""Processes that are forked from one that has a pipeline, as those of `gunicorn --preload`.

The threads of OpenMP, with which PyTorch computes, do not survive a fork: a forked process would wait for them
forever.
"""

import functools
import os

import torch
from diffusers.utils import logging


logger = logging.get_logger(__name__)

# Whether this process computes in one thread because it was forked, and has not said so yet.
limited = False


@functools.cache
def limit_forks() -> None:
    """Let processes that are forked from now on compute in one thread."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_limit)


def _limit() -> None:
    global limited
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        limited = True


def warn() -> None:
    """Say, once, that a process is `limited`."""
    global limited
    limited = False
    logger.warning(
        "this process was forked from one with a pipeline and computes in one thread: to use more threads, load the "
        'pipeline after the fork, or start processes with the method "spawn"'
    )
