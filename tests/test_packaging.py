"""Wheel, sdist and editable install: presets, schema and plugin reach a foreign Hydra application from each."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from hydra_app import App

ROOT = Path(__file__).parents[1]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "chakra_capture", "hydra_plugins")
ORIGIN = """
import sys
import chakra_capture.presets, hydra_plugins.chakra_capture_plugin as plugin
print(chakra_capture.presets.__file__, plugin.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the project is built from, so that no build output lands in the working tree."""
    folder = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def built(source: Path) -> Path:
    """The folder with the sdist and the wheel that was built from it."""
    copy = source.with_name("to-build")
    shutil.copytree(source, copy)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=copy)
    return copy / "dist"


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable"])
def environment(
    request: pytest.FixtureRequest, source: Path, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A virtual environment with one kind of install, and the folder that its modules must come from."""
    folder = tmp_path_factory.mktemp(request.param) / "venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Dependencies come from the running environment. A path in a .pth file does not run the .pth files found there,
    # so an editable install of this project in that environment stays invisible.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    what: list[str | Path] = {
        "wheel": [*built.glob("*.whl")],
        "sdist": [*built.glob("*.tar.gz")],
        "editable": ["-e", source],
    }[request.param]
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    run(*pip, *what, cwd=folder)
    return python, source if request.param == "editable" else site


@pytest.fixture
def app(environment: tuple[Path, Path], tmp_path: Path) -> App:
    return App(tmp_path, python=str(environment[0]))


def test_modules_come_from_the_install_and_not_from_the_working_tree(
    environment: tuple[Path, Path], tmp_path: Path
) -> None:
    python, home = environment
    for module in run(python, "-c", ORIGIN, cwd=tmp_path).split():
        assert Path(module).is_relative_to(home)


def test_group_is_found_by_command_line_defaults_list_and_nested(app: App) -> None:
    settings = app.settings("+chakra_profile=nemo_sample", "chakra_profile.trace_dir=t", "chakra_profile.end_step=7")
    assert (settings["enabled"], settings["start_step"], settings["end_step"]) == (True, 5, 7)
    nested = app.settings("+chakra_profile@model.chakra_profile=one_step", "model.chakra_profile.trace_dir=t")
    assert (nested["enabled"], nested["trace_dir"]) == (True, "t")
    app.write("config", "defaults: [{chakra_profile: one_step}, _self_]\nchakra_profile: {trace_dir: ./mine}\n")
    assert app.settings("chakra_profile.with_stack=true")["with_stack"] is True


def test_unknown_key_is_named(app: App) -> None:
    message = app.error("+chakra_profile=one_step", "chakra_profile.start_stp=5")
    assert "Key 'start_stp' not in 'ChakraProfileConfig'" in message


def test_without_the_plugin_the_section_is_text_and_the_message_says_so(
    app: App, environment: tuple[Path, Path]
) -> None:
    plugin = environment[1] / "hydra_plugins" / "chakra_capture_plugin.py"
    hidden = plugin.rename(plugin.with_suffix(".hidden"))
    try:
        message = app.error("+chakra_profile=one_step")
    finally:
        hidden.rename(plugin)
    assert "chakra_profile is the text 'one_step': Hydra did not find the group" in message
    assert "Check that chakra-capture is installed" in message


def test_wheel_holds_package_presets_and_plugin_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"chakra_capture", "hydra_plugins"}
    assert [name for name in names if name.startswith("hydra_plugins/")] == ["hydra_plugins/chakra_capture_plugin.py"]
    presets = sorted(path.name for path in (ROOT / "chakra_capture/presets/chakra_profile").glob("*.yaml"))
    assert sorted(name.split("/")[-1] for name in names if name.endswith(".yaml")) == presets
    assert "chakra_capture/py.typed" in names
    for name in ("style.css", "page.js", "templates/page.html", "templates/blocks.html"):
        assert f"chakra_capture/report/{name}" in names
