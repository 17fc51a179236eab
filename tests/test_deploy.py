"""The Dockerfile and deploy/: their files, flags and names fit together. Nothing is built or started."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixrt import cli
from radixrt.wire.keys import is_private
from tests.documents import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE, CUDA = read("compose.yaml"), read("compose.cuda.yaml")
SERVICES = COMPOSE["services"]


def defaults(text: str) -> str:
    """As compose reads it where no variables are set."""
    return re.sub(r"\$\{\w+:-(\w*)\}", r"\1", text)


def mounted(service: str) -> dict[str, str]:
    """Where a service has which folder or volume."""
    return {path: source for source, path in (m.split(":")[:2] for m in SERVICES[service]["volumes"])}


# ---------------------------------------------------------------- images


def test_the_image_is_for_cpus_by_default_and_cuda_is_a_target() -> None:
    assert [name for _, name in STAGES] == ["build", "cuda", "cpu"]
    server = SERVICES["radixrt"]
    assert defaults(server["build"]["target"]) == "cpu" and CUDA["services"]["radixrt"]["build"]["target"] == "cuda"
    assert (DEPLOY / server["build"]["context"] / "Dockerfile").samefile(ROOT / "Dockerfile")


def test_images_have_versions() -> None:
    images = [image for image, _ in STAGES] + [s["image"] for name, s in SERVICES.items() if name != "radixrt"]
    assert len(images) == 6
    for image in images:
        assert re.search(r":v?\d+\.\d+", image), image


def test_what_is_copied_is_in_the_build_context() -> None:
    patterns = (ROOT / ".dockerignore").read_text().split()
    kept = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    copied = [line.split()[1:-1] for line in re.findall(r"^COPY .*$", DOCKERFILE, re.MULTILINE)]
    assert patterns[0] == "*" and sum(copied, [])
    for name in sum(copied, []):
        assert (ROOT / name).exists() and any(fnmatch(name, pattern) for pattern in kept), name


def test_images_install_parts_that_there_are() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"radixrt\[(\w+)\] @", DOCKERFILE):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    (torch,) = re.findall(r"'(torch\S+)' --index-url", DOCKERFILE)
    assert f'"{torch}"' in project, "the CPU wheel has another version than the package wants"


def test_the_image_serves_by_default() -> None:
    for command in re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE):
        cli.build_parser().parse_args(yaml.safe_load(command))


# ---------------------------------------------------------------- compose


def test_the_server_is_given_flags_that_there_are_and_keys_that_are_made(tmp_path: Path) -> None:
    command = [defaults(word) for word in SERVICES["radixrt"]["command"]]
    args = cli.build_parser().parse_args(command)
    assert (args.model, args.host) == ("nano", "0.0.0.0")
    made = set(re.findall(r"> (/keys/\w+)", SERVICES["keys"]["command"][-1]))
    assert {name.removeprefix("@") for name in (*args.api_key, args.admin_api_key)} < made
    assert mounted("radixrt")["/keys"] == mounted("keys")["/keys"] == "keys"


def run_keys(folder: Path) -> dict[str, str]:
    """Run the script of the service `keys`. Returns what it has written."""
    shell, flags, script = SERVICES["keys"]["command"]
    subprocess.run([shell, flags, script.replace("$$", "$").replace("/keys", str(folder))], check=True)
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="files are given to other users")
def test_keys_are_made_once_and_each_is_for_one_user(tmp_path: Path) -> None:
    first = run_keys(tmp_path)
    assert run_keys(tmp_path) == first and set(first) == {"tenants", "admin", "prometheus"}
    assert re.fullmatch(r"default:[\w-]{32}\n", first["tenants"]) and first["prometheus"] == first["admin"].strip()
    assert first["admin"].strip() not in first["tenants"]
    owners = {path.name: path.stat().st_uid for path in tmp_path.iterdir()}
    assert owners == {"tenants": 10001, "admin": 10001, "prometheus": 65534}
    assert "USER 10001" in DOCKERFILE
    assert all(is_private(str(path)) for path in tmp_path.iterdir())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_ports_are_open_on_this_machine_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)


def test_what_services_mount_and_wait_for_is_there() -> None:
    for name, service in SERVICES.items():
        for source in mounted(name).values():
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_dir(), f"{name}: {source}"
        assert set(service.get("depends_on", ())) <= SERVICES.keys()


# ---------------------------------------------------------------- Prometheus and Grafana


def test_prometheus_asks_the_server_with_the_key_that_is_made_for_it() -> None:
    folder = DEPLOY / mounted("prometheus")["/etc/prometheus"]
    assert SERVICES["prometheus"]["command"][0] == "--config.file=/etc/prometheus/compose.yml"
    config, plain = (yaml.safe_load((folder / name).read_text()) for name in ("compose.yml", "prometheus.yml"))
    (job,), (plain_job,) = config["scrape_configs"], plain["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["radixrt:8000"]}]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": "/keys/prometheus"}
    assert mounted("prometheus")["/keys"] == mounted("keys")["/keys"]
    assert job["job_name"] == plain_job["job_name"] and config["rule_files"] == plain["rule_files"]
    assert all((folder / rules).exists() for rules in config["rule_files"])


def test_grafana_finds_its_source_and_its_dashboard() -> None:
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in SERVICES and SERVICES[host]["ports"][0].endswith(f":{port}")
    (provider,) = read("grafana/provisioning/dashboards/radixrt.yaml")["providers"]
    folder = DEPLOY / mounted("grafana")[provider["options"]["path"]]
    assert mounted("grafana")["/etc/grafana/provisioning"] == "./grafana/provisioning"
    dashboard = (folder / "dashboard.json").read_text()
    named = set(re.findall(r'"type": "prometheus",\s*"uid": "([^"]+)"', dashboard))
    assert named and all(uid == source["uid"] or uid.startswith("$") for uid in named)


def test_kernels_are_compiled_into_the_image_of_gpus_by_a_build_argument() -> None:
    (line,) = [line for line in DOCKERFILE.splitlines() if "build-kernels" in line and line.startswith("RUN")]
    (command,) = re.findall(r"radixrt (build-kernels --aot) \$KERNELS", line)
    (example,) = re.findall(r"--build-arg KERNELS='(.*)'", (ROOT / "docs/gpu.md").read_text())
    asked = cli.build_parser().parse_args([*command.split(), *re.sub("'", "", example).split()])
    assert asked.aot and asked.head_dim == [128] and asked.cuda_arch_list == "9.0a"
    assert 'ARG KERNELS=""' in DOCKERFILE.partition(" AS cuda")[2].partition("\nFROM ")[0]
