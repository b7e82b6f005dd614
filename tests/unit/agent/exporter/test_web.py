"""The exporter's HTTP server with real clients (TLS, users, misbehaving clients), and the command `rackproof export`."""

from __future__ import annotations

import base64
import contextlib
import gzip
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import GaugeMetricFamily

from agent.exporter import web
from agent.exporter.defaults import COLLECT_S
from agent.exporter.web import Server
from agent.exporter.web_config import WebConfig, WebConfigError, read_web_config
from tests import ROOT
from tests.accepted import rackproof

PASSWORD = "correct horse battery staple"


def registry() -> CollectorRegistry:
    result = CollectorRegistry()
    Gauge("rackproof_answer", "Help", registry=result).set(42)
    return result


def curl(*arguments: str) -> tuple[int, str]:
    """Return the HTTP status (0: no answer), and the received body followed by curl's error message, if any."""
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--max-time", "10", "--write-out", "\n%{http_code}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    body, _, status = done.stdout.rpartition("\n")
    return int(status or 0), body + done.stderr


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a CA, two certificates that it has signed (`server`, `client`), and the self-signed certificate `stranger`.

    Return the directory of the certificates and their keys.
    """
    directory = tmp_path_factory.mktemp("pki")
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    for name, signed in (("ca", ""), ("server", "ca"), ("client", "ca"), ("stranger", "")):
        by = ["-CA", f"{signed}.crt", "-CAkey", f"{signed}.key"] if signed else []
        kind = ["-addext", "basicConstraints=critical,CA:" + ("TRUE" if name == "ca" else "FALSE")]
        kind += ["-addext", "subjectAltName=IP:127.0.0.1"] if name == "server" else []
        subject = ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
        subprocess.run([*new, *by, *kind, *subject], cwd=directory, check=True, capture_output=True)
    return directory


def config(path: Path, text: str) -> WebConfig:
    file = path / "web.config.yml"
    file.write_text(text)
    return read_web_config(file)


@contextlib.contextmanager
def serving(web_config: WebConfig | None = None) -> Iterator[str]:
    with Server(registry(), "127.0.0.1", 0, web_config) as server:
        yield f"{server.scheme}://127.0.0.1:{server.port}"


# ---- responses ----


def test_server_offers_plain_text_openmetrics_and_compression() -> None:
    with serving() as url:
        assert curl(f"{url}/metrics") == (
            200,
            "# HELP rackproof_answer Help\n# TYPE rackproof_answer gauge\nrackproof_answer 42.0\n",
        )
        status, body = curl("-H", "Accept: application/openmetrics-text; version=1.0.0", f"{url}/metrics")
        assert status == 200
        assert body.endswith("# EOF\n")
        zipped = subprocess.run(
            ["curl", "--silent", "-H", "Accept-Encoding: gzip", f"{url}/metrics"], capture_output=True, check=True
        )
        assert b"rackproof_answer 42.0" in gzip.decompress(zipped.stdout)


@pytest.mark.parametrize(
    ("accepted", "is_zipped"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("deflate, gzip; q=1", True),
        ("gzip;q=0, br", False),
        ("gzip; q=0.000", False),
        ("deflate", False),
        ("", False),
    ],
)
def test_metrics_are_compressed_if_the_client_accepts_gzip(accepted: str, is_zipped: bool) -> None:
    with serving() as url:
        answer = subprocess.run(
            ["curl", "--silent", "-H", f"Accept-Encoding: {accepted}", f"{url}/metrics"],
            capture_output=True,
            check=True,
        )
    assert answer.stdout.startswith(b"\x1f\x8b") == is_zipped


def test_page_that_cannot_be_rendered_is_a_server_error_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> Iterator[Metric]:
            raise ValueError("a family without a name")

    broken = CollectorRegistry()
    broken.register(Broken())  # type: ignore[arg-type]
    with Server(broken, "127.0.0.1", 0) as server:
        status, body = curl(f"http://127.0.0.1:{server.port}/metrics")
        assert (status, curl(f"http://127.0.0.1:{server.port}/")[0]) == (500, 200)
    assert "cannot be answered" in body
    assert "a family without a name" not in body
    assert "a request cannot be answered" in caplog.text
    assert "a family without a name" in caplog.text


ACCEPTS = (
    *(
        "",
        "*/*",
        "text/plain",
        "text/plain; version=x",
        "text/plain; version=1.0.0",
        "application/openmetrics-text; version=x",
    ),
    *(f"application/openmetrics-text; version=1.{number}.0; escaping=allow-utf-8" for number in range(50)),
    *(
        "application/openmetrics-text; version=",
        "application/json",
        ";;,,==",
        "application/openmetrics-text; version=9" * 50,
    ),
)


def test_pages_are_cached_in_two_formats_whatever_clients_accept(caplog: pytest.LogCaptureFixture) -> None:
    with Server(registry(), "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        assert {curl("-H", f"Accept: {accept}", url)[0] for accept in ACCEPTS} == {200}
        assert len(server._page._cache) == 2
    assert caplog.text == ""


class Recorder:
    """A prometheus_client collector that records the time limit of the collectors in each scrape, and waits for `may_end`."""

    def __init__(self) -> None:
        self.limits: list[float] = []
        self.may_end = threading.Event()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        self.limits.append(COLLECT_S.get())
        self.may_end.wait()
        return [GaugeMetricFamily("rackproof_answer", "Help", value=42)]

    def registry(self) -> CollectorRegistry:
        result = CollectorRegistry()
        result.register(self)  # type: ignore[arg-type]
        return result


@pytest.mark.parametrize(
    ("timeout", "limit_s"),
    [
        ("5", 4),
        ("5.000000", 4),
        ("10", 8),
        ("60", 8),
        ("0.1", 2),
        ("0", 8),
        ("-1", 8),
        ("nan", 8),
        ("inf", 8),
        ("x", 8),
    ],
)
def test_collectors_end_before_the_timeout_of_the_scraper(timeout: str, limit_s: float) -> None:
    recorder = Recorder()
    recorder.may_end.set()
    with Server(recorder.registry(), "127.0.0.1", 0, fresh_s=0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        assert curl("-H", f"X-Prometheus-Scrape-Timeout-Seconds: {timeout}", url)[0] == 200
        assert curl(url)[0] == 200
    assert recorder.limits == pytest.approx([limit_s, 8], abs=0.5)


def test_page_of_a_scraper_with_a_shorter_timeout_is_not_given_to_others() -> None:
    recorder = Recorder()
    recorder.may_end.set()
    with Server(recorder.registry(), "127.0.0.1", 0, fresh_s=3600) as server:
        for timeout in ("3", "3", "10", "3", "10"):
            curl("-H", f"X-Prometheus-Scrape-Timeout-Seconds: {timeout}", f"http://127.0.0.1:{server.port}/metrics")
    assert recorder.limits == pytest.approx([2.4, 8], abs=0.5)


def test_scrape_that_waits_for_another_gets_its_page() -> None:
    recorder, statuses = Recorder(), []
    with Server(recorder.registry(), "127.0.0.1", 0, fresh_s=0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        clients = [threading.Thread(target=lambda: statuses.append(curl(url)[0])) for _ in range(2)]
        for client in clients:
            before = server.last_request
            client.start()
            while server.last_request == before:
                time.sleep(0.01)
        recorder.may_end.set()
        for client in clients:
            client.join()
    assert (statuses, len(recorder.limits)) == ([200, 200], 1)


@pytest.mark.parametrize("address", ["::", "0:0:0:0:0:0:0:0"])
def test_unspecified_address_of_ipv6_includes_ipv4(address: str) -> None:
    with Server(registry(), address, 0) as server:
        assert [curl(f"http://{host}:{server.port}/metrics")[0] for host in ("127.0.0.1", "[::1]")] == [200, 200]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["/"], 200),
        (["/metrics?name[]=x"], 200),
        (["/etc/passwd"], 404),
        (["/metrics", "-X", "POST", "-d", "x=1"], 405),
    ],
)
def test_server_has_two_pages_that_allow_only_reading(arguments: list[str], status: int) -> None:
    with serving() as url:
        assert curl(url + arguments[0], *arguments[1:])[0] == status


# ---- users ----


@pytest.fixture(scope="module")
def hashed() -> str:
    return bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


def test_basic_auth_requires_the_password(tmp_path: Path, hashed: str) -> None:
    with serving(config(tmp_path, f"basic_auth_users:\n  prometheus: {hashed}\n")) as url:
        page = f"{url}/metrics"
        assert [curl("-u", f"prometheus:{PASSWORD}", page)[0] for _ in range(2)] == [200, 200]
        assert curl(page)[0] == 401
        assert curl("-u", "prometheus:wrong", page)[0] == 401
        assert curl("-u", f"stranger:{PASSWORD}", page)[0] == 401
        assert curl("-u", "prometheus:" + "x" * 100, page)[0] == 401
        zero = base64.b64encode(b"prometheus:a\0b").decode()
        for header in ("Basic !!!", "Basic", "Bearer abc", "Basic /w==", f"Basic {zero}"):
            assert curl("-H", f"Authorization: {header}", page)[0] == 401


# ---- TLS ----


def test_tls_serves_clients_that_trust_the_ca(tmp_path: Path, pki: Path) -> None:
    text = f"tls_server_config:\n  cert_file: {pki}/server.crt\n  key_file: {pki}/server.key\n"
    with serving(config(tmp_path, text)) as url:
        page = f"{url}/metrics"
        assert curl("--cacert", f"{pki}/ca.crt", page)[0] == 200
        assert curl(page)[0] == 0
        assert curl(page.replace("https", "http"))[0] == 0
        assert curl("--cacert", f"{pki}/ca.crt", "--tls-max", "1.1", page)[0] == 0


def test_mutual_tls_serves_only_clients_whose_certificate_the_ca_has_signed(tmp_path: Path, pki: Path) -> None:
    text = f"""
tls_server_config:
  cert_file: {pki}/server.crt
  key_file: {pki}/server.key
  client_ca_file: {pki}/ca.crt
  client_auth_type: RequireAndVerifyClientCert
  min_version: TLS13
"""
    with serving(config(tmp_path, text)) as url:
        trusting = ["--cacert", f"{pki}/ca.crt", f"{url}/metrics"]
        assert curl("--cert", f"{pki}/client.crt", "--key", f"{pki}/client.key", *trusting)[0] == 200
        assert curl(*trusting)[0] == 0
        assert curl("--cert", f"{pki}/stranger.crt", "--key", f"{pki}/stranger.key", *trusting)[0] == 0
        assert curl("--tls-max", "1.2", "--cert", f"{pki}/client.crt", "--key", f"{pki}/client.key", *trusting)[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls_server_config: {cert_file: a.crt}", "needs both cert_file and key_file"),
        ("tls_server_config: {cert_file: a.crt, key_file: a.key}", "a.crt with key .*No such file"),
        ("tls_server_config: {cert: a.crt}", "unknown key cert: use one of cert_file"),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequestClientCert}",
            "use one of NoClientCert",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "needs client_ca_file",
        ),
        ("basic_auth_users: {prometheus: secret}", "the password of prometheus is not a bcrypt hash: create one"),
        ("basic_auth_users: [prometheus]", "basic_auth_users is not a mapping"),
        ("basic_auth_user: {}", "unknown key basic_auth_user"),
        ("a: [", "web.config.yml: while parsing"),
    ],
)
def test_invalid_web_config_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WebConfigError, match=message) as error:
        config(tmp_path, text).context()
    assert "secret" not in str(error.value)


# ---- misbehaving clients ----


def test_connections_without_a_complete_request_are_closed_and_do_not_block_other_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "HEAD_S", 0.5)
    with Server(registry(), "127.0.0.1", 0) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(300)]
        for client in idle[::2]:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n")  # never sends the empty line that ends the request
        before = threading.active_count()
        assert curl(f"http://127.0.0.1:{server.port}/metrics")[0] == 200
        assert threading.active_count() <= before + 1
        for client in idle:
            client.settimeout(5)
            assert client.recv(1) == b""


def test_tls_connections_are_limited_before_their_handshake(
    tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web, "HEAD_S", 1.0)
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 100)
    text = f"tls_server_config:\n  cert_file: {pki}/server.crt\n  key_file: {pki}/server.key\n"
    with serving(config(tmp_path, text)) as url, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        before = len(list(Path("/proc/self/fd").iterdir()))
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(400)]
        time.sleep(0.3)
        # The server runs in this process too. The new file descriptors are the clients and the server's connections.
        assert len(list(Path("/proc/self/fd").iterdir())) - before - len(clients) <= 101
        for client in clients:
            client.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert curl("--cacert", f"{pki}/ca.crt", f"{url}/metrics")[0] == 200
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
        (b"GET /metrics SMTP/1.0\r\n\r\n", b"400"),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_malformed_request_is_refused(sent: bytes, status: bytes) -> None:
    with serving() as url:
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5) as client:
            with contextlib.suppress(OSError):
                client.sendall(sent)
            assert client.recv(100).split(b" ")[1] == status
        assert curl(f"{url}/metrics")[0] == 200


# ---- the command ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "--port 99999: not a port"),
        (["--gpus", "0,x"], "--gpus 0,x: 'x' is not an NVML index"),
        (["--textfile", "metrics.txt"], "node_exporter reads files that end in .prom"),
        (["--textfile", "metrics.prom", "--for-run"], "--textfile serves no scrapes: leave out one of the two"),
        (["--textfile", "/nowhere/a.prom"], "its directory does not exist"),
        (["--every", "0"], "--every 0: give 1 to 3600 seconds"),
        (["--sample-hz", "0.5"], "--sample-hz 0.5: give 1 to 50, or 0 for none"),
        (["--window", "0"], "--window 0: give 1 to 600 seconds"),
        (["--web-config", "/nowhere/web.yml"], "/nowhere/web.yml: No such file or directory"),
        (["--listen", "203.0.113.1"], "cannot listen on --listen 203.0.113.1: this host has no such address; give an"),
        (["--listen", "300.1.1.1"], "cannot listen on --listen 300.1.1.1: "),
    ],
)
def test_wrong_command_line_exits_64(arguments: list[str], message: str) -> None:
    done = rackproof("export", *arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_textfile_is_complete_and_is_removed_when_the_exporter_ends(tmp_path: Path) -> None:
    path = tmp_path / "rackproof.prom"
    writer = subprocess.Popen(
        [sys.executable, str(ROOT / "rackproof"), "export", "--textfile", str(path), "--every", "1"],
        stderr=subprocess.DEVNULL,
    )
    ends = time.monotonic() + 30
    while not path.exists() and time.monotonic() < ends:
        time.sleep(0.05)
    assert re.search(r"^rackproof_collector_success\{collector=\"host\"\} 1.0$", path.read_text(), re.MULTILINE)
    assert "\nprocess_" not in path.read_text(), (
        "the `process_…` metrics must be left out: node_exporter exports metrics of the same names"
    )
    writer.terminate()
    assert writer.wait(20) == 0
    assert list(tmp_path.iterdir()) == []
