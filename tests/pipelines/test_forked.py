"""A process that is forked from one that has generated generates the same, in one thread."""

import os
import signal

import pytest
import torch
from families import seeded
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.pipelines import forked


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def occupy_both_threads():
    torch.randn(1024, 1024) @ torch.randn(1024, 1024)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_generates_in_one_thread_and_says_so_once(monkeypatch):
    pipe, said = tiny_llamagen.text_pipeline(), []
    monkeypatch.setattr(forked.logger, "warning", said.append)

    def generate():
        return pipe("a red heart", generator=seeded(0), output_type="pt").images

    occupy_both_threads()
    expected = generate()
    child = os.fork()
    if child == 0:
        # What hangs ends, and nothing of the tests runs twice.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)
        status = 1
        try:
            occupy_both_threads()
            same = [torch.allclose(generate(), expected, atol=1e-4) for _ in range(2)]
            if all(same) and torch.get_num_threads() == 1 and len(said) == 1 and "one thread" in said[0]:
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.get_num_threads() == 2 and not said
