"""The wheel, the sdist, their metadata, the workflows, and use without torch."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import fpipe

ROOT = Path(fpipe.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "import sys; from hatchling import build; build.build_{kind}(sys.argv[1])"


def build(kind: str, source: Path, out: Path) -> Path:
    """A wheel or an sdist of a source tree, by the backend of pyproject.toml, without a network."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-c", BUILD.format(kind=kind), str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=60)
    (found,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel")))


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_wheel_has_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile):
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fpipe").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == source
    assert {"fpipe/py.typed", "fpipe/products/pictures/viewer/page.html"} <= packed


def test_metadata(wheel: zipfile.ZipFile):
    found = metadata(wheel)
    assert found["Version"] == fpipe.__version__
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert not [line for line in found.get_all("Classifier", []) if line.startswith("License")], (
        "PEP 639 forbids both"
    )
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    urls = dict(url.split(", ") for url in found.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} == urls.keys()
    assert all(re.fullmatch(r"https://[\w./-]+", url) for url in urls.values())
    assert found.get_content_type() and "# fpipe" in str(found.get_payload())


def test_wheel_runs(wheel: zipfile.ZipFile, tmp_path: Path):
    wheel.extractall(tmp_path)
    code = "import fpipe; print(fpipe.__file__, repr(fpipe.make_schedule('ZBV', 2, 4).check()))"
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(str(tmp_path)) and "stages=4" in done.stdout


@pytest.mark.long
def test_wheel_is_installed_and_its_command_draws(wheel: zipfile.ZipFile, tmp_path: Path):
    """In a new environment, whose other packages are those of this one."""
    assert wheel.filename
    packages = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", packages], check=True)
    python = packages / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel.filename]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *install],
        check=True,
        capture_output=True,
        timeout=100,
    )
    (installed,) = packages.glob("lib/python*/site-packages")
    (installed / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command: str | Path) -> str:
        return subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout

    assert run(python, "-c", "import fpipe; print(fpipe.__file__)").startswith(str(installed))
    drawn = run(packages / "bin" / "fpipe", "draw", "1F1B", "--ranks", "4", "--microbatches", "8")
    assert "total 33, bubble 27.3%" in drawn


def test_make_wheel_builds_a_wheel_alone():
    """The command of the Makefile, which downloads the backend of pyproject.toml, is not run."""
    command = ["make", "wheel", "--dry-run", "PYTHON=python3"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pip wheel" in shown and "--no-deps --wheel-dir dist ." in shown
    assert "pip install dist/fpipe-*.whl" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_sdist_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path):
    with tarfile.open(build("sdist", ROOT, tmp_path)) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in (
        "LICENSE",
        "CHANGELOG.md",
        "SECURITY.md",
        "Makefile",
        "tests/conftest.py",
        "docs/tutorial.md",
    ):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()
    again = zipfile.ZipFile(build("wheel", source, tmp_path))
    assert again.namelist() == wheel.namelist()
    assert [
        name for name in again.namelist() if again.getinfo(name).CRC != wheel.getinfo(name).CRC
    ] == []


def test_workflows_run_the_versions_of_the_metadata():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    assert {"lint", "tests", "docs"} <= jobs.keys()
    named = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    first, beyond = re.findall(
        r"2\.(\d+)", next(line for line in PROJECT["dependencies"] if line.startswith("torch"))
    )
    pinned = re.search(
        r"^torch==2\.(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M
    )
    assert pinned is not None
    versions = {
        int(version.split(".")[1]) for version in jobs["torch"]["strategy"]["matrix"]["torch"]
    }
    assert versions | {int(pinned[1])} == set(range(int(first), int(beyond)))
    targets = re.findall(
        r"make ([\w-]+)", (ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8")
    )
    assert all(
        re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        for target in targets
    )


# ---- without torch ----
BLOCKED = """
    import sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "optree"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Blocked())
    import fpipe
    from fpipe.products.command.cli import main
"""


def without_torch(code: str, cwd: Path) -> str:
    """What code prints in a process that cannot import torch."""
    program = textwrap.dedent(BLOCKED) + textwrap.dedent(code)
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    done = subprocess.run(run, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_schedules_without_torch(tmp_path: Path):
    printed = without_torch(
        """
        schedule = fpipe.make_schedule("ZBV", 4, 8).check()
        solved = fpipe.solve(fpipe.Costs(), 2, 4, time_limit=1)
        print(schedule.simulate(fpipe.Costs(F=1, I=1, W=1)).total, solved.gap)
        fpipe.Schedule.parse(str(schedule)).simulate().save("zbv.svg")
        drawn = main(["draw", "1F1B", "--ranks", "2", "--microbatches", "2"])
        print(drawn, main(["check", "[0F0, 0B0]"]))
        print(main(["compare", "--ranks", "2", "--microbatches", "4"]), main(["names"]))
        """,
        tmp_path,
    )
    assert "0 0" in printed and (tmp_path / "zbv.svg").exists()


def test_the_rest_without_torch_says_what_to_install(tmp_path: Path):
    printed = without_torch(
        """
        for name in ("pipeline", "adamw", "testing"):
            try:
                getattr(fpipe, name)
            except ModuleNotFoundError as error:
                print(error)
        print(main(["train"]))
        """,
        tmp_path,
    )
    assert (
        "fpipe.pipeline needs torch, which is not installed: pip install torch. Without it "
        "schedules can" in printed
    )
    assert "fpipe.adamw needs" in printed and "fpipe.testing needs" in printed
    assert "this command needs torch" in printed and printed.count("Traceback") == 0
