"""What operators of a server expect: it drains, speaks TLS behind a proxy, and names its requests."""

import datetime
import ipaddress
import logging
import signal
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from app.server.serve_kit import BACKENDS, backend_of
from app.server.server_kit import metric, picture, running, serving, wait_for
from pipelines.llamagen import tiny as tiny_llamagen
from starlette.testclient import TestClient

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.server.app import build_server
from arimage.app.server.routes import pages
from arimage.app.server.uvicorn_server import Server, check_certificate, check_socket


GENERATIONS, BODY = "/v1/images/generations", {"prompt": "a red heart"}


@pytest.fixture(scope="module")
def engine():
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of a certificate for 127.0.0.1, and of its key."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "arimage")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    signed = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8
    for file, encryption in (
        ("key.pem", serialization.NoEncryption()),
        ("locked.pem", serialization.BestAvailableEncryption(b"secret")),
    ):
        (folder / file).write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, encryption))
    return folder / "cert.pem", folder / "key.pem"


# Draining


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_draining_server_finishes_what_it_has_begun(kind, held):
    with backend_of(kind, {"text": held}, Limits(queue=4, batch=1)) as (backend, _), ThreadPoolExecutor() as pool:
        with running(backend) as (server, address):
            asked = [pool.submit(httpx.post, address + GENERATIONS, json=BODY, timeout=60) for _ in range(3)]
            wait_for(lambda: held.entered.is_set() and server._state.running == 3)
            server.on_signal(signal.SIGTERM)
            wait_for(lambda: server._state.draining)
            with httpx.Client(base_url=address) as client:
                health = client.get("/health")
                assert (health.status_code, health.json()) == (503, {"status": "draining"})
                assert health.headers["connection"] == "close"
                refused = client.post(GENERATIONS, json=BODY)
                assert refused.status_code == 503 and refused.headers["connection"] == "close"
                assert int(refused.headers["retry-after"]) > 0 and refused.json()["error"]["type"] == "server_error"
                assert client.get("/v1/models").status_code == 200
            assert not any(answer.done() for answer in asked)
            held.go.set()
            assert [answer.result(60).status_code for answer in asked] == [200] * 3
            wait_for(lambda: server.stopping, 10)


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT] * 2])
def test_a_second_signal_or_the_end_of_draining_cancels_requests(held, signals):
    engine, seconds = Engine({"text": held}), 0.5 if len(signals) == 1 else 60
    with running(engine, drain_seconds=seconds) as (server, address), ThreadPoolExecutor() as pool:
        asked = pool.submit(httpx.post, address + GENERATIONS, json=BODY, timeout=60)
        wait_for(held.entered.is_set)
        began = time.monotonic()
        for number in signals:
            server.on_signal(number)
        assert asked.result(30).status_code == 503 and time.monotonic() - began < 10
        assert time.monotonic() - began > 0.4 or len(signals) == 2
        held.go.set()


def test_nothing_is_lost_when_a_busy_server_is_replaced():
    """Every request of clients that do not stop asking is answered, or refused so that the client knows."""
    own = Engine({"text": tiny_llamagen.text_pipeline()}, Limits(batch=4))
    answers, stopped = [], threading.Event()

    def ask(server: Server, address: str) -> None:
        with httpx.Client(base_url=address, timeout=60) as client:
            while not stopped.is_set():
                try:
                    answers.append(client.post(GENERATIONS, json=BODY))
                except httpx.TransportError:
                    # Its end also resets connections that it has not accepted yet.
                    assert server.stopping
                    return

    with running(own) as (server, address):
        threads = [threading.Thread(target=ask, args=(server, address)) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answers) > 24)
        server.on_signal(signal.SIGTERM)
        wait_for(lambda: server.stopping, 30)
        stopped.set()
        for thread in threads:
            thread.join(30)
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)


# TLS, proxies and sockets


def test_tls_behind_a_root_path(engine, certificate):
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    files = check_certificate(*certificate)
    own = Engine({"text": tiny_llamagen.text_pipeline()})
    with serving(own, certificate=files, root_path="/images") as address, httpx.Client(verify=trusted) as client:
        # A proxy may remove the path or leave it.
        for path in ("", "/images"):
            answer = client.post(f"{address}{path}{GENERATIONS}", json=BODY | {"response_format": "url"})
            url = answer.raise_for_status().json()["data"][0]["url"]
            assert url.startswith(f"{address}/images/pictures/")
            assert picture(client.get(url).content).size == (8, 8)
            assert client.head(f"{address}{path}/health").status_code == 200
            assert f"{address}/images/v1/images/generations" in client.get(f"{address}{path}/").text
        assert client.get(f"{address}/openapi.json").json()["servers"] == [{"url": "/images"}]
        with pytest.raises(httpx.HTTPError):
            httpx.get(address.replace("https", "http"))


def test_a_certificate_that_cannot_be_used_is_named(certificate, tmp_path):
    cert, key = certificate
    assert check_certificate(None, None) is None
    for files, option in (
        ((cert, None), "--ssl-keyfile"),
        ((None, key), "--ssl-certfile"),
        ((tmp_path / "none", key), "--ssl-certfile"),
        ((cert, tmp_path), "--ssl-keyfile"),
        ((cert, cert), "cannot be used"),
        ((cert, key.with_name("locked.pem")), "without a password"),
    ):
        with pytest.raises(ValueError, match=option):
            check_certificate(*files)


def test_a_unix_socket_is_served(tmp_path):
    path = tmp_path / "socket"
    check_socket(path)
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    with running(engine, uds=path):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            answer = client.post(GENERATIONS, json=BODY, headers={"X-Forwarded-For": "203.0.113.7"})
            assert answer.status_code == 200
        with pytest.raises(ValueError, match="--uds is .* another program listens"):
            check_socket(path)
    # One that a killed server has left is free.
    check_socket(path)
    path.write_text("")
    with pytest.raises(ValueError, match="--uds"):
        check_socket(path)
    with pytest.raises(ValueError, match="--uds"):
        check_socket(tmp_path / "none" / "socket")


@pytest.mark.parametrize("path", ["images", "/images/", "/", "/a b", "//a"])
def test_a_root_path_has_one_form(engine, path):
    with pytest.raises(ValueError, match="--root-path"):
        build_server(engine, root_path=path)


# Requests


def test_requests_have_ids_in_the_answer_and_in_the_log(engine, caplog):
    with (
        caplog.at_level(logging.INFO, "arimage.access"),
        TestClient(build_server(engine), base_url="http://127.0.0.1") as client,
    ):
        for given, kept in (("trace-1.2:3", True), ("x" * 65, False), ("two words", False), ("", False)):
            answer = client.get("/v1/models", headers={"x-request-id": given})
            found = answer.headers["x-request-id"]
            assert (found == given) == kept and '"GET /v1/models" 200' in caplog.text and found in caplog.text
        refused = client.post(GENERATIONS, json={"prompt": ""})
        assert refused.headers["x-request-id"] in caplog.text
        client.get("/pictures/secret")
        client.get("/none%0Aforged")
    assert "secret" not in caplog.text and "/none%0Aforged" in caplog.text
    answered = openai.OpenAI(
        base_url="http://127.0.0.1/v1", api_key="none", http_client=client
    ).models.with_raw_response
    assert answered.list().request_id


def test_an_answer_to_what_fails_has_the_headers_of_others(engine, caplog, monkeypatch):
    def fails(metrics):
        raise RuntimeError("broken")

    monkeypatch.setattr(pages, "exposition", fails)
    app, site = build_server(engine, allow_origin=["https://chat.example.org"]), "https://chat.example.org"
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.get("/metrics", headers={"Origin": site})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] and answer.headers["access-control-allow-origin"] == site
    assert "RuntimeError: broken" in caplog.text


def test_the_instrumentation_of_opentelemetry_traces_requests(engine):
    module = pytest.importorskip("opentelemetry.instrumentation.fastapi", reason="the extra `telemetry`")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, spans = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    app, trace = build_server(engine), "0af7651916cd43dd8448eb211c80319c"
    module.FastAPIInstrumentor.instrument_app(app, tracer_provider=provider)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        client.post(GENERATIONS, json=BODY, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    [span] = [one for one in spans.get_finished_spans() if one.name == f"POST {GENERATIONS}"]
    assert f"{span.context.trace_id:032x}" == trace


def test_metrics_tell_the_models_the_queue_and_the_first_partial_image():
    pipelines = {name: tiny_llamagen.text_pipeline() for name in ("one", "two")}
    with serving(Engine(pipelines, Limits(gathering=0.3))) as address, httpx.Client(base_url=address) as client:
        client.post(GENERATIONS, json=BODY | {"model": "two"})
        client.post(GENERATIONS, json=BODY | {"model": "two", "stream": True, "partial_images": 2})
        client.post(GENERATIONS, json=BODY | {"model": "one", "size": "9x9"})
        client.post(GENERATIONS, json=BODY | {"model": "three"})
        for name, labels, value in (
            ("arimage_requests_total", {"model": "two", "status": "200"}, 2),
            ("arimage_requests_total", {"model": "one", "status": "400"}, 1),
            ("arimage_requests_total", {"model": "", "status": "404"}, 1),
            ("arimage_request_seconds_count", {"model": "two"}, 2),
            ("arimage_queue_seconds_count", {"model": "two"}, 2),
            ("arimage_first_partial_image_seconds_count", {"model": "two"}, 1),
            ("arimage_first_partial_image_seconds_count", {}, 1),
            ("arimage_images_total", {"model": "two"}, 2),
            ("arimage_forward_passes_total", {"model": "one"}, 0),
            ("arimage_tokens_total", {"model": "two"}, 32),
        ):
            assert metric(address, name, **labels) == value, name
        # The engine gathers requests for so long.
        assert metric(address, "arimage_queue_seconds_sum", model="two") > 0.5


def test_each_of_several_tokens_is_a_client(engine, monkeypatch):
    clients, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda asked, *rest: (clients.append(asked.client), submit(asked, *rest))[1])
    app = build_server(engine, tokens=["one", "two"])
    with TestClient(app) as client:
        for token, status in (("one", 200), (" two ", 200), ("three", 401), ("onetwo", 401), ("", 401)):
            headers = {"Authorization": f"bearer {token}"}
            assert client.get("/v1/models", headers=headers).status_code == status
            assert client.post(GENERATIONS, json=BODY, headers=headers).status_code == status
    with TestClient(build_server(engine), base_url="http://127.0.0.1", client=("203.0.113.7", 1)) as client:
        assert client.post(GENERATIONS, json=BODY).status_code == 200
    assert clients == ["token 0", "token 1", "203.0.113.7"]
