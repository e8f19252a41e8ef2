"""The package as users get it: builds the wheel, installs it into a fresh environment, and trains there, far from the
sources. Needs no network: the environment borrows torch from the one that runs the tests.

Marked `wheel`, since the first build compiles the core anew (minutes); later ones reuse build-wheel/ and ccache.
"""

import email
import glob
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
import torch

pytestmark = pytest.mark.wheel
pytest.importorskip("scikit_build_core", reason="the environment can't build wheels: see tools/requirements.lock")

REPO = pathlib.Path(__file__).resolve().parents[2]
TORCH = re.match(r"\d+\.\d+\.\d+", torch.__version__)[0]
VERSION = re.search(r"project\(ragged_fsdp VERSION ([\d.]+)", (REPO / "CMakeLists.txt").read_text())[1]

TRAIN = """
import gc, pathlib, sys
import torch
import torch.distributed as dist
from torch import nn
import ragged_fsdp
from ragged_fsdp import fully_shard, rows

assert pathlib.Path(ragged_fsdp.__file__).is_relative_to(sys.prefix), ragged_fsdp.__file__
dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
x = torch.randn(4, 5)
losses = []
for layer in (model[0], model[2]):
    fully_shard(layer, shard_policy=rows(2))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    ragged_fsdp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[2] < losses[1] < losses[0], losses
if dist.get_rank() == 0:
    print("trained", dist.get_world_size(), ragged_fsdp.__version__)
dist.barrier()
dist.destroy_process_group()
del model, layer, optimizer, loss  # the group's threads end with its last holder, before Python is torn down
gc.collect()
"""


def clean_env(**more):
    """Without what would lead past the installed wheel, or to the network."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TORCH_WHEEL", "CMAKE_ARGS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**env, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", **more}


def run(*command, cwd, check=True, **env):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean_env(**env), capture_output=True, text=True, timeout=1800
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run(*pip, "--wheel-dir", folder, REPO, cwd=folder, CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count() or 1))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """An environment with nothing in it; returns its python."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of an environment with the wheel and a torch."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # With dependencies, though there is no index: the torch that is there must satisfy the wheel.
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", wheel, cwd=folder)
    return folder / "bin" / "python"


def test_holds_the_package_and_nothing_else(wheel):
    python = REPO / "python"
    sources = [path for kind in ("*.py", "*.pyi", "py.typed") for path in (python / "ragged_fsdp").rglob(kind)]
    expected = {str(path.relative_to(python)) for path in sources}
    expected |= {f"ragged_fsdp/_C{sysconfig.get_config_var('EXT_SUFFIX')}", "ragged_fsdp/built_with_torch.txt"}
    info = f"ragged_fsdp-{VERSION}.dist-info"
    expected |= {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == expected
        assert archive.read("ragged_fsdp/built_with_torch.txt").decode().strip() == TORCH
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert {"ragged_fsdp/_C.pyi", "ragged_fsdp/py.typed"} <= expected, "typed"
    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata["Requires-Dist"].removeprefix("torch").split(",")) == {">=2.12", "<2.16"}


def test_extension_needs_only_torch_and_the_compilers_libraries(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        archive.extract(name, tmp_path)
    dynamic = run("readelf", "--dynamic", tmp_path / name, cwd=tmp_path).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    # gomp lies in the wheel beside libtorch_cpu, which has loaded it already
    torch = "torch_cpu|torch_python|torch_cuda|c10|c10_cuda|cudart|gomp"
    known = re.compile(rf"lib({torch}|stdc\+\+|gcc_s|c|m)\.so|ld-linux")
    assert needed and all(known.match(library) for library in needed), needed
    assert re.findall(r"(?:RUNPATH|RPATH).*\[(.*)\]", dynamic) == ["$ORIGIN/../torch/lib"]


def test_trains_on_two_ranks_from_another_folder(installed, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = [installed, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert f"trained 2 {VERSION}" in run(*torchrun, "train.py", cwd=tmp_path).stdout


def test_refuses_a_torch_that_it_was_not_built_with(installed, tmp_path):
    (record,) = glob.glob(f"{installed.parents[1]}/lib/python*/site-packages/ragged_fsdp/built_with_torch.txt")
    try:
        pathlib.Path(record).write_text("2.13.0\n")
        done = run(installed, "-c", "import ragged_fsdp", cwd=tmp_path, check=False)
    finally:
        pathlib.Path(record).write_text(f"{TORCH}\n")
    assert done.returncode == 1
    assert "ImportError: [import] Expected torch 2.13.0, which ragged_fsdp was built with, but got" in done.stderr
    assert "--no-build-isolation" in done.stderr


def test_refuses_a_torch_that_is_too_old(installed, tmp_path):
    script = "import torch; torch.__version__ = '2.11.0'; import ragged_fsdp"
    done = run(installed, "-c", script, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "ImportError: [import] Expected torch 2.12 to 2.15, but got 2.11.0" in done.stderr


def configure(python, folder, **env):
    return run(
        "cmake", "-S", REPO, "-B", folder, "-DSKBUILD=2", f"-DPython3_EXECUTABLE={python}",
        "-DRAGGED_BUILD_TESTS=OFF", "-DRAGGED_BUILD_BENCH=OFF", "-DRAGGED_BUILD_COMMAND=OFF",
        cwd=REPO, check=False, **env,
    )  # fmt: skip


def test_a_build_that_sees_no_torch_says_how_to_show_it_one(bare, tmp_path):
    done = configure(bare, tmp_path)
    message = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "Expected an installed torch wheel" in message and "pip install --no-build-isolation ." in message


@pytest.mark.parametrize("way", ["isolated", "variable"])
def test_a_build_finds_torch_though_it_can_not_import_it(bare, tmp_path, way):
    """pip's isolated build takes the packages of the environment off sys.path, but runs the same interpreter; other
    tools build in an environment of their own, and are told by a variable."""
    folder = sysconfig.get_path("purelib")
    hide = tmp_path / "hide" / "sitecustomize.py"
    hide.parent.mkdir()
    hide.write_text(f"import sys\nsys.path[:] = [path for path in sys.path if path != {folder!r}]\n")
    if way == "isolated":
        done = configure(sys.executable, tmp_path / "build", PYTHONPATH=str(hide.parent))
    else:
        done = configure(bare, tmp_path / "build", TORCH_WHEEL=f"{folder}/torch")
    assert f"torch {TORCH} at {folder}/torch" in done.stdout, done.stdout + done.stderr
