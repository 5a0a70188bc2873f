"""Test what is published: an installed wheel works, and all files name the same version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import raysim

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder of its own, without its dependencies; return the folder."""
    target = tmp_path_factory.mktemp("installed")
    command = [
        "uv",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return target


@pytest.mark.slow
def test_wheel_contains_only_package_and_configuration(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "raysim", "conf"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    if not tracked:
        pytest.skip("not a checkout")
    wanted = {f"raysim/{name}" if name.startswith("conf/") else name for name in tracked.split()}
    assert wanted <= names
    assert {name.partition("/")[0] for name in names} == {"raysim"}


@pytest.mark.slow
def test_installed_wheel_finds_its_configuration(installed: Path, tmp_path: Path) -> None:
    def raysim(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        command = [sys.executable, "-m", "raysim", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert "fedbr" in raysim("methods")
    raysim(
        "run",
        "data=synthetic",
        "model=mlp",
        "rounds=1",
        "runtime=inprocess",
        "tracking=none",
        "out=run",
    )
    found = "from raysim.primitives.files import conf_folder; print(conf_folder())"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    asked = subprocess.run(
        [sys.executable, "-c", found], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert Path(asked.stdout.strip()) == installed / "raysim" / "conf"
    assert (tmp_path / "run" / "summary.json").is_file()


def test_changelog_and_citation_have_the_package_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == raysim.__version__
    assert citation["license"] == PROJECT["license"]
    versions = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", raysim.__version__]


def test_dockerfile_copies_existing_files() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [
        line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from=" not in line
    ]
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line[:1] == "!"
    }
    sources = {name for names in copied for name in names}
    assert sources and sources <= kept
    assert all((ROOT / name).exists() for name in sources)
    assert {line.split()[0] for line in lines if line and line[0] not in "# "} <= {
        *("FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"),
    }
