"""CUDA modules as they are built on a machine without a GPU: the instructions meant are there, nothing is spilled."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tilewright.codegen import cuda_toolchain
from tilewright.codegen.build import build_all
from tilewright.runtime.errors import BuildError
from tilewright.runtime.manifest import CUBIN_NAME, read_manifest
from tilewright.runtime.store import default_root
from tilewright.schedules.catalog import all_workloads
from tilewright.schedules.spaces import UnsupportedWorkload, get_space
from tilewright.schedules.workload import Workload

# Every generator with the shapes that differ most. All of the catalogue takes minutes: TILEWRIGHT_TEST_ALL_CUDA=1.
SUBSET = {
    "cuda-sm90a": [
        "paged_decode-bf16-g4-d128", "paged_decode-bf16-g3-d64", "paged_decode-fp16-g8-d128",
        "paged_decode-bf16-g16-d576v512", "paged_decode-bf16-kvfp8-g4-d128",
        "paged_extend-bf16-g4-d128", "paged_extend-bf16-g3-d64", "merge-bf16", "write_kv-bf16", "write_kv-bf16-kvfp8",
    ],
    "cuda-sm80": ["paged_decode-bf16-g4-d128", "paged_decode-bf16-g16-d576v512", "paged_decode-bf16-kvfp8-g4-d128",
                  "paged_extend-bf16-g4-d128", "merge-bf16"],
}  # fmt: skip
# Beside the catalogue: what `tilewright build` makes of any legal shape. One of each kind of extend by mma.sync.
BESIDE = {
    "cuda-sm90a": [
        "paged_extend-bf16-g5-d72", "paged_extend-fp16-g4-d256", "paged_extend-fp16-kvfp8-g2-d64-tree",
    ],
    "cuda-sm80": ["paged_extend-bf16-kvfp8-g22-d576v512"],
}  # fmt: skip
# What a launch leaves a thread of 65536 registers, with the CTAs that should share a multiprocessor.
MOST_OF_WIDE = 255  # decode with one CTA of eight warps
MOST_REGISTERS = {"paged_decode": 208, "paged_extend": 168, "merge": 64, "write_kv": 64}
MOST_REGISTERS_MMA = 255


def _missing() -> str:
    try:
        cuda_toolchain.check_installed()
    except BuildError as error:
        return str(error)
    return ""


needs_compiler = pytest.mark.skipif(bool(_missing()), reason=_missing() or "installed")


def _chosen(target):
    beside = [Workload.parse(name) for name in BESIDE[target]]
    if os.environ.get("TILEWRIGHT_TEST_ALL_CUDA"):
        return [*all_workloads(target), *beside]
    return [Workload.parse(name) for name in SUBSET[target]] + beside


@pytest.fixture(scope="module")
def kernels():
    """(target, workload) -> the kernel of its module, each built once (if not up to date)."""
    found = {}
    for target in SUBSET:
        for built in build_all(_chosen(target), target):
            (kernel,) = cuda_toolchain.kernels(built.folder / CUBIN_NAME)
            found[target, built.workload] = kernel
    return found


def test_subset_is_of_the_catalogue():
    for target, names in SUBSET.items():
        listed = {workload.name for workload in all_workloads(target)}
        assert set(names) <= listed and not set(BESIDE[target]) & listed


@needs_compiler
@pytest.mark.parametrize("target", SUBSET)
def test_machine_code_is_what_was_meant(kernels, target):
    for workload in _chosen(target):
        kernel = kernels[target, workload]
        count = Counter(instruction.split(".")[0] for instruction in kernel.instructions)
        assert kernel.name == f"{workload.operator}_kernel"
        assert kernel.stack == 0, f"{workload.name}: {kernel.stack} bytes of local memory a thread"
        assert count["LDL"] == count["STL"] == 0, workload.name
        decisions = json.loads((default_root() / target / workload.name / "record.json").read_text())["decisions"]
        by_warps = "columns" in decisions  # extend by mma.sync
        dims = (workload.head_dim_qk or 0, workload.head_dim_vo or 0)
        wide = workload.operator == "paged_decode" and max(dims) > 256
        most = MOST_OF_WIDE if wide else MOST_REGISTERS_MMA if by_warps else MOST_REGISTERS[workload.operator]
        assert kernel.registers <= most, workload.name
        if wide:
            warps = decisions["warps"]
            # A warp scores eight keys, and multiplies all of the tile with its share of the columns of V.
            values = warps // 2 * (dims[1] // 16 // warps)
            assert count["HMMA"] == dims[0] // 16 + 2 * values and count["HGMMA"] == 0, workload.name
            assert count["LDGSTS"] > 0 and count["LDSM"] == dims[0] // 32 + warps // 2 + values, workload.name
        elif workload.operator == "paged_decode":
            per = 32 if workload.kv_dtype else 16  # columns that a load brings
            parts = decisions["keys"] // 16  # of a tile: two products for every 16 columns of K and every 16 of V
            assert count["HMMA"] == parts * 2 * (dims[0] // 16 + dims[1] // 16) and count["HGMMA"] == 0, workload.name
            assert count["LDGSTS"] > 0 and count["LDSM"] == parts * sum(dims) // per, workload.name
        elif by_warps:
            blocks = decisions["rows"] * decisions["columns"] // (16 * decisions["warps"])
            keys, columns = decisions["keys"], decisions["columns"]
            # Of values, eight columns that are there: the compiler leaves out what is beyond them.
            part = dims[1] // 8 if columns == 1 else -(-dims[1] // 16) * 2 // columns
            scores = blocks * (keys // columns // 8) * -(-dims[0] // 16)
            assert count["HMMA"] == scores + blocks * part * (keys // 16) and count["HGMMA"] == 0, workload.name
            assert count["LDGSTS"] > 0 and count["LDSM"] > 0, workload.name
        elif workload.operator == "paged_extend":
            keys = decisions["keys"]
            # Scores and values, in the loop and once before and after it.
            assert count["HGMMA"] == 2 * (dims[0] // 16 + keys // 16) and count["HMMA"] == 0, workload.name
            assert count["LDGSTS"] > 0 and count["USETMAXREG"] == 2, workload.name
            # A wait for each group of products; one after each product means that the compiler has serialised them.
            assert sum(name.startswith("WARPGROUP.DEPBAR") for name in kernel.instructions) == 4, workload.name
        elif workload.operator == "merge":
            assert (count["ACQBULK"] > 0) is (target == "cuda-sm90a"), "waits for the kernel before"
        else:
            assert count["LDG"] > 0 and count["STG"] > 0, workload.name


@needs_compiler
def test_element_type_reaches_the_products(kernels):
    """bf16 modules multiply bf16, fp16 modules fp16."""
    for (target, workload), kernel in kernels.items():
        products = {i for i in kernel.instructions if i.startswith(("HMMA", "HGMMA"))}
        if workload.operator.startswith("paged") and not workload.kv_dtype:  # codes of fp8 are halves
            assert all(("BF16" in name) is (workload.dtype == "bf16") for name in products), (target, products)


@needs_compiler
def test_manifest_says_how_to_launch(kernels):
    for target, workload in kernels:
        manifest = read_manifest(default_root() / target / workload.name)
        assert manifest.features == [target.removeprefix("cuda-").replace("sm", "sm_")]
        (entry,) = manifest.kernels.values()
        early = workload.operator in ("merge", "paged_decode") and target == "cuda-sm90a"
        assert ("programmatic" in entry.launch) is early


@pytest.fixture
def no_remembered_toolkit():
    cuda_toolchain._toolkit.cache_clear()
    yield
    cuda_toolchain._toolkit.cache_clear()


def test_missing_compiler_is_named(monkeypatch, no_remembered_toolkit):
    monkeypatch.delenv("TILEWRIGHT_CUDA_TOOLKIT", raising=False)
    monkeypatch.setattr(cuda_toolchain.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"pip install 'tilewright\[cuda\]'"), cuda_toolchain.toolchain():
        pass


@needs_compiler
def test_an_installed_toolkit_is_used_where_it_is_named(monkeypatch, tmp_path, no_remembered_toolkit):
    monkeypatch.delenv("TILEWRIGHT_CUDA_TOOLKIT", raising=False)
    packages = cuda_toolchain.toolkit()
    folder = tmp_path / "cuda"
    monkeypatch.setenv("TILEWRIGHT_CUDA_TOOLKIT", str(folder))
    with pytest.raises(BuildError, match=r"TILEWRIGHT_CUDA_TOOLKIT: .*/cuda: expected a CUDA toolkit .* no include/"):
        cuda_toolchain.toolkit()
    assert cuda_toolchain.compiler_version() == ""
    folder.mkdir()
    (folder / "include").symlink_to(packages.include)
    with pytest.raises(BuildError, match=r"neither lib64 nor lib has libcudart\.so\.13"):
        cuda_toolchain.toolkit()
    (folder / "lib64").symlink_to(packages.libraries)
    (folder / "bin").symlink_to(packages.programs)
    found = cuda_toolchain.toolkit()
    assert (found.include, found.libraries) == (folder / "include", folder / "lib64")
    program = (
        "from tilewright.codegen.build import build\n"
        "from tilewright.schedules.workload import Workload\n"
        "from pathlib import Path; import sys\n"
        "built = build(Workload('write_kv', 'bf16'), 'cuda-sm90a', root=Path(sys.argv[1]))\n"
        "loaded = Path('/proc/self/maps').read_text()\n"
        "assert (built.folder / 'module.cubin').stat().st_size > 1000 and 'libnvrtc.so.13' in loaded\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "modules")], check=True, timeout=120)


@needs_compiler
def test_toolchain_leaves_the_environment_alone():
    program = (
        "import os; before = dict(os.environ)\n"
        "from tilewright.codegen.cuda_toolchain import toolchain\n"
        "with toolchain():\n"
        "    inside = os.environ['CUDA_PATH']; assert os.path.isfile(inside + '/include/cuda_runtime.h')\n"
        "assert dict(os.environ) == before and not os.path.exists(inside)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "target", "why"),
    [
        ("paged_decode-f32-g4-d128", "cuda-sm90a", "f32"),
        ("paged_decode-bf16-general", "cuda-sm90a", "general"),
        ("paged_extend-bf16-g4-d100", "cuda-sm90a", "multiples of 8"),
        ("paged_extend-bf16-kvfp8-g4-d72", "cuda-sm80", "multiples of 16"),
        ("paged_extend-bf16-g4-d1024", "cuda-sm80", "shared memory"),
        ("paged_decode-bf16-g4-d592v512", "cuda-sm90a", "up to"),
        ("paged_decode-bf16-kvfp8-g16-d576v512", "cuda-sm90a", "fp8"),
        ("paged_decode-bf16-g4-d100", "cuda-sm90a", "multiples of 8"),
        ("paged_decode-bf16-kvfp8-g4-d72", "cuda-sm90a", "multiples of 16"),
        ("lightning_decode-bf16-d128", "cuda-sm90a", "no kernels"),
    ],
)
def test_unsupported_workloads_are_refused(name, target, why):
    with pytest.raises(UnsupportedWorkload, match=why):
        get_space(Workload.parse(name), target)


@pytest.mark.parametrize("target", SUBSET)
def test_defaults_are_legal(target):
    for workload in all_workloads(target):
        space = get_space(workload, target)
        assert space.legal(space.default)
        assert all(space.default[name] in values for name, values in space.choices.items())
        if workload.operator.startswith("paged"):
            assert space.plan(space.default)["block_q"] >= 1


@pytest.mark.parametrize("target", SUBSET)
def test_decode_takes_every_shape(target):
    """Groups of any size, head dims that are multiples of 8; what does not fit is refused by name, not built wrong."""
    dims = [(8, 24), (16, 16), (72, 72), (120, 120), (64, 64), (80, 80), (96, 96), (192, 128), (192, 192), (256, 256)]
    for dim, dim_vo in [*dims, (320, 320), (576, 512)]:
        for group in (1, 3, 4, 5, 6, 7, 8, 16, 22, 128):
            for kv_dtype in (None, "fp8_e4m3") if dim <= 256 and dim % 16 == 0 else (None,):
                workload = Workload("paged_decode", "bf16", group, dim, dim_vo, kv_dtype)
                space = get_space(workload, target)
                assert space.legal(space.default), workload.name
                assert space.plan(space.default)["blocks"] == -(-group // 16)
