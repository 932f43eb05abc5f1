import threading
import time
from pathlib import Path

import certifi
import pytest
from pipelines.llamagen import tiny as tiny_llamagen


@pytest.fixture(autouse=True, scope="session")
def one_authority(tmp_path_factory):
    """Clients trust one authority: they talk to this machine, and every new one would read the list of all."""
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("tls") / "authority.pem"
    file.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


class SlowPipeline:
    """A pipeline whose forward passes take `pace` seconds longer."""

    def __init__(self, pipe):
        self._pipe, self.pace = pipe, 0.0
        pipe.transformer.register_forward_pre_hook(lambda *_: time.sleep(self.pace))

    def __getattr__(self, name):
        return getattr(self._pipe, name)


class HeldPipeline(SlowPipeline):
    """A slow pipeline in an engine whose images do not start until `go` is set."""

    def __init__(self, pipe):
        super().__init__(pipe)
        self.go, self.entered = threading.Event(), threading.Event()

    def prepare(self, **arguments):
        # The engine also prepares a call without seeds, to read the abilities of the model.
        if "generator" in arguments:
            self.entered.set()
            assert self.go.wait(60)
        return self._pipe.prepare(**arguments)


@pytest.fixture
def held() -> HeldPipeline:
    return HeldPipeline(tiny_llamagen.text_pipeline())
