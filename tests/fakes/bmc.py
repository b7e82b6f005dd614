"""BMCs for tests: Redfish resources in the shapes of several vendors, and an HTTPS server that can also misbehave."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fleet.bmc.target import BmcTarget

Resources = dict[str, dict[str, Any]]
USER, PASSWORD = "canary-user", "canary-password-7f3a"
OK = {"State": "Enabled", "Health": "OK"}
CRITICAL = {"State": "Enabled", "Health": "Critical"}
ABSENT = {"State": "Absent"}
V1 = "/redfish/v1"
SEL = f"{V1}/Systems/1/LogServices/SEL/Entries"
GPU_SERIALS = ("1650422000001", "1650422000002")


def link(path: str) -> dict[str, str]:
    return {"@odata.id": f"{V1}{path}"}


def _root() -> dict[str, Any]:
    return {name: link(f"/{name}") for name in ("Systems", "Chassis", "Managers", "UpdateService")}


def _collection(path: str, *ids: str) -> dict[str, Any]:
    return {"@odata.id": f"{V1}{path}", "Members": [link(f"{path}/{item}") for item in ids]}


def entry(number: int, message: str = "Fan removed", severity: str | None = "Warning", **more: Any) -> dict[str, Any]:
    """Return entry `number` of an event log, created `number` seconds (modulo one day) after midnight."""
    created = f"2026-11-03T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}Z"
    return {"Id": str(number), "Created": created, "Severity": severity, "Message": message, **more}


def old_schema() -> Resources:
    """Return the resources of a healthy server. Its chassis has `Power` and `Thermal`, as on Supermicro and older BMCs.

    Power supply bay 4 and fan slot 11 are empty.
    """
    supply = {"Status": OK, "LineInputVoltage": 239, "PowerOutputWatts": 329, "SerialNumber": "P3K0"}
    empty = {"Status": ABSENT, "LineInputVoltage": None, "PowerOutputWatts": None, "SerialNumber": ""}
    return {
        V1: _root(),
        f"{V1}/Systems": _collection("/Systems", "1"),
        f"{V1}/Systems/1": {
            "Id": "1",
            "SerialNumber": "S123456X",
            "Status": OK,
            "Processors": link("/Systems/1/Processors"),
            "LogServices": link("/Systems/1/LogServices"),
        },
        f"{V1}/Systems/1/Processors": _collection("/Systems/1/Processors", "CPU1", "GPU1", "GPU2"),
        f"{V1}/Systems/1/Processors/CPU1": {
            "Id": "CPU1",
            "ProcessorType": "CPU",
            "SerialNumber": "CPU-SERIAL",
            "Status": OK,
        },
        **{
            f"{V1}/Systems/1/Processors/GPU{number}": {
                "Id": f"GPU{number}",
                "ProcessorType": "GPU",
                "SerialNumber": serial,
                "Status": OK,
            }
            for number, serial in enumerate(GPU_SERIALS, 1)
        },
        f"{V1}/Systems/1/LogServices": _collection("/Systems/1/LogServices", "SEL", "AuditLog"),
        f"{V1}/Systems/1/LogServices/SEL": {"Id": "SEL", "LogEntryType": "SEL", "Entries": {"@odata.id": SEL}},
        f"{V1}/Systems/1/LogServices/AuditLog": {"Id": "AuditLog", "LogEntryType": "Event", "Entries": link("/none")},
        SEL: {"@odata.id": SEL, "Members@odata.count": 1, "Members": [entry(1)]},
        f"{V1}/Managers": _collection("/Managers"),
        f"{V1}/Chassis": _collection("/Chassis", "1"),
        f"{V1}/Chassis/1": {
            "Id": "1",
            "SerialNumber": "C900",
            "Status": OK,
            "Power": link("/Chassis/1/Power"),
            "Thermal": link("/Chassis/1/Thermal"),
        },
        f"{V1}/Chassis/1/Power": {
            "PowerSupplies": [
                {"Name": "Power Supply Bay 1", **supply},
                {"Name": "Power Supply Bay 2", **supply},
                {"Name": "Power Supply Bay 3", **supply},
                {"Name": "Power Supply Bay 4", **empty},
            ],
            "Redundancy": [{"Name": "PS Redundancy", "Mode": "N+m", "Status": OK}],
            "Voltages": [
                {
                    "Name": "12V",
                    "ReadingVolts": 12.1,
                    "LowerThresholdCritical": 10.8,
                    "UpperThresholdCritical": 13.2,
                    "Status": OK,
                }
            ],
        },
        f"{V1}/Chassis/1/Thermal": {
            "Fans": [
                {"Name": "FAN9", "Reading": 2240, "ReadingUnits": "RPM", "LowerThresholdCritical": 420, "Status": OK},
                {"Name": "FAN10", "Reading": 2100, "ReadingUnits": "RPM", "LowerThresholdCritical": 420, "Status": OK},
                {"Name": "FAN11", "Reading": None, "Status": {"State": "Disabled"}},
            ],
            "Temperatures": [
                {
                    "Name": "CPU1 Temp",
                    "ReadingCelsius": 29,
                    "UpperThresholdCritical": 99,
                    "UpperThresholdFatal": None,
                    "Status": OK,
                },
                {
                    "Name": "System Temp",
                    "PhysicalContext": "Intake",
                    "ReadingCelsius": 24,
                    "UpperThresholdCritical": 45,
                    "Status": OK,
                },
            ],
        },
        f"{V1}/UpdateService": {"FirmwareInventory": link("/UpdateService/FirmwareInventory")},
        f"{V1}/UpdateService/FirmwareInventory": _collection(
            "/UpdateService/FirmwareInventory", "BMC", "Backup_BIOS", "Pending"
        ),
        f"{V1}/UpdateService/FirmwareInventory/BMC": {"Id": "BMC", "Version": "01.03.17  ", "Status": OK},
        f"{V1}/UpdateService/FirmwareInventory/Backup_BIOS": {
            "Id": "Backup_BIOS",
            "Version": "Not Present",
            "Status": OK,
        },
        f"{V1}/UpdateService/FirmwareInventory/Pending": {
            "Id": "Pending",
            "Version": None,
            "Status": {"State": "Disabled", "Health": None},
        },
    }


def new_schema() -> Resources:
    """Return the resources of a healthy tray with `PowerSubsystem`, `ThermalSubsystem` and `Sensors`, as on OpenBMC.

    The tray has no power supply. All its parts are healthy, but its `HealthRollup` is `Critical`: an old log entry can do this.
    """
    tray, gpu = f"{V1}/Chassis/Chassis_0", f"{V1}/Chassis/HGX_GPU_0"
    detectors = "/Chassis/Chassis_0/ThermalSubsystem/LeakDetection/LeakDetectors"
    return {
        V1: {name: link(f"/{name}") for name in ("Systems", "Chassis", "Managers")},
        f"{V1}/Systems": _collection("/Systems", "System_0"),
        f"{V1}/Systems/System_0": {"Id": "System_0", "SerialNumber": "", "Status": {**OK, "Conditions": []}},
        f"{V1}/Managers": _collection("/Managers"),
        f"{V1}/Chassis": _collection("/Chassis", "Chassis_0", "HGX_GPU_0"),
        tray: {
            "Id": "Chassis_0",
            "SerialNumber": "1830000000001",
            "Status": {**OK, "HealthRollup": "Critical"},
            "PowerSubsystem": link("/Chassis/Chassis_0/PowerSubsystem"),
            "ThermalSubsystem": link("/Chassis/Chassis_0/ThermalSubsystem"),
        },
        f"{tray}/PowerSubsystem": {"PowerSupplies": link("/Chassis/Chassis_0/PowerSubsystem/PowerSupplies")},
        f"{tray}/PowerSubsystem/PowerSupplies": _collection("/Chassis/Chassis_0/PowerSubsystem/PowerSupplies"),
        f"{tray}/ThermalSubsystem": {
            "Fans": link("/Chassis/Chassis_0/ThermalSubsystem/Fans"),
            "LeakDetection": link("/Chassis/Chassis_0/ThermalSubsystem/LeakDetection"),
        },
        f"{tray}/ThermalSubsystem/Fans": _collection("/Chassis/Chassis_0/ThermalSubsystem/Fans"),
        f"{tray}/ThermalSubsystem/LeakDetection": {"LeakDetectors": link(detectors)},
        f"{V1}{detectors}": _collection(detectors, "ColdPlate"),
        f"{V1}{detectors}/ColdPlate": {"Id": "ColdPlate", "DetectorState": "OK", "Status": OK},
        gpu: {
            "Id": "HGX_GPU_0",
            "SerialNumber": GPU_SERIALS[0],
            "Status": OK,
            "Sensors": link("/Chassis/HGX_GPU_0/Sensors"),
        },
        f"{gpu}/Sensors": _collection("/Chassis/HGX_GPU_0/Sensors", "TEMP_0", "TLIMIT_0"),
        f"{gpu}/Sensors/TEMP_0": {
            "Id": "TEMP_0",
            "Reading": 38.09,
            "ReadingUnits": "Cel",
            "Thresholds": {"UpperCritical": {"Reading": 92.0}},
            "Status": OK,
        },
        f"{gpu}/Sensors/TLIMIT_0": {"Id": "TLIMIT_0", "Reading": 53.0, "ReadingUnits": "Cel", "Status": OK},
    }


def lost_supply(resources: Resources) -> Resources:
    """Change these resources of `old_schema` so that power supply 2 has no input and redundancy is lost. Return them."""
    power = resources[f"{V1}/Chassis/1/Power"]
    power["PowerSupplies"][1] |= {"Status": CRITICAL, "LineInputVoltage": 0, "PowerOutputWatts": 0}
    power["Redundancy"][0]["Status"] = CRITICAL
    resources[f"{V1}/Systems/1"]["Status"] = CRITICAL
    return resources


def write_mockup(resources: Mapping[str, Any], directory: Path) -> Path:
    """Write the resources as a mock-up, and return the directory that `sushy-static` is to serve."""
    for path, document in resources.items():
        file = directory / path.strip("/") / "index.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(document), encoding="utf-8")
        part.rename(file)  # a server that reads meanwhile gets the old or the new document
    return directory / V1.strip("/")


def make_certificate(directory: Path, name: str = "127.0.0.1") -> Path:
    """Write a self-signed certificate for `name` (an IP address or a host name), and its key with the suffix `.key`.

    Return the path of the certificate.
    """
    path = directory / f"{name}.pem"
    kind = "IP" if name[0].isdigit() else "DNS"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=bmc",
            "-addext",
            f"subjectAltName={kind}:{name}",
            "-out",
            path,
            "-keyout",
            path.with_suffix(".key"),
        ],
        check=True,
        capture_output=True,
    )
    return path


Answer = Callable[[BaseHTTPRequestHandler], bool]
"""Function that answers a request and returns True, or returns False if the service is to answer the request."""


class Service:
    """A Redfish service with sessions. A collection that has the key `page_size` is returned in pages (`$skip`, `$top`)."""

    def __init__(self, resources: Resources, answer: Answer | None = None) -> None:
        self.resources, self.answer = resources, answer
        self.requests: list[str] = []
        self.sessions: set[str] = set()
        self.port = 0

    def target(self, certificate: Path, **changed: Any) -> BmcTarget:
        """Return the address and credentials of this service, as the BMC of host h1; `changed` replaces fields."""
        fields: dict[str, Any] = {
            "host": "h1",
            "address": f"127.0.0.1:{self.port}",
            "user": USER,
            "password": PASSWORD,
            "ca": str(certificate),
        }
        return BmcTarget(**{**fields, **changed})


def _handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16
        disable_nagle_algorithm = True

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

        def reply(self, status: int, document: Any, **headers: str) -> None:
            content = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            service.requests.append(f"GET {self.path}")
            if service.answer and service.answer(self):
                return
            parts = urlsplit(self.path)
            if parts.path.rstrip("/") != V1 and self.headers.get("X-Auth-Token") not in service.sessions:
                self.reply(401, {"error": {"code": "Base.1.12.GeneralError", "message": "no valid session"}})
                return
            document = service.resources.get(parts.path.rstrip("/"))
            self.reply(200, _page(document, parse_qs(parts.query))) if document else self.reply(404, {"error": {}})

        def do_POST(self) -> None:
            service.requests.append(f"POST {self.path}")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if service.answer and service.answer(self):
                return
            if (body["UserName"], body["Password"]) != (USER, PASSWORD):
                self.reply(401, {"error": {"code": "Base.1.12.GeneralError", "message": "refused"}})
                return
            token = f"token{len(service.requests)}"
            service.sessions.add(token)
            self.reply(201, {}, X_Auth_Token=token, Location=f"{V1}/SessionService/Sessions/{token}")

        def do_DELETE(self) -> None:
            service.sessions.discard(self.path.rpartition("/")[2])
            self.reply(204, b"")

    return Handler


def _page(document: dict[str, Any], query: Mapping[str, list[str]]) -> dict[str, Any]:
    size = document.get("page_size")
    if not size:
        return document
    skip, members = int(query.get("$skip", ["0"])[0]), document["Members"]
    page = members[skip : skip + min(size, int(query.get("$top", [size])[0]))]
    following = (
        {"Members@odata.nextLink": f"{document['@odata.id']}?$skip={skip + size}"} if skip + size < len(members) else {}
    )
    return {"@odata.id": document["@odata.id"], "Members@odata.count": len(members), "Members": page, **following}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: in the tests, clients end connections early on purpose."""


@contextmanager
def serve(service: Service, certificate: Path) -> Iterator[Service]:
    """Serve over HTTPS on a free port of 127.0.0.1."""
    server = _Server(("127.0.0.1", 0), _handler(service))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    service.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
