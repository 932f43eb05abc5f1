import threading
import time

import pytest
import tiny


class HeldPipeline:
    """A text pipeline whose calls wait until `go` is set, and whose forward passes then take `pace` seconds longer."""

    def __init__(self, pipe):
        self._pipe, self.go, self.entered, self.pace = pipe, threading.Event(), threading.Event(), 0.0

    def __getattr__(self, name):
        return getattr(self._pipe, name)

    def __call__(self, *, callback_on_step_end, **arguments):
        self.entered.set()
        assert self.go.wait(60)

        def slowed(*values):
            time.sleep(self.pace)
            callback_on_step_end(*values)

        return self._pipe(callback_on_step_end=slowed, **arguments)


@pytest.fixture
def held() -> HeldPipeline:
    return HeldPipeline(tiny.text_pipeline())
