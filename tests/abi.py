"""`make test-abi`: load and run every built x86 module with the lowest, the pinned and the newest apache-tvm-ffi.

The range that this proves is TVM_FFI_MIN .. TVM_FFI_MAX of runtime/manifest.py; a newest release outside it fails here
and asks for the constant to be raised. Each version is installed alone into build/abi/<version> and put before the
environment's own, so torch and everything else are shared. Not part of `make test`: it installs from the package index.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "abi"


def child(expected: str) -> int:
    """Run every module that the store finds; the count, or an exception."""
    from importlib.metadata import version

    import tvm_ffi

    from tilewright.codegen.smoke import smoke
    from tilewright.runtime import store
    from tilewright.schedules.catalog import all_workloads

    got = version("apache-tvm-ffi")
    assert expected in ("", got), (expected, got)
    assert Path(tvm_ffi.__file__).is_relative_to(FOLDER), tvm_ffi.__file__
    count = 0
    for target in store.candidate_targets():
        for workload in all_workloads(target.name):
            if store.find(workload, target.name).found is not None:
                smoke(store.load(workload, target.name))
                count += 1
    assert "tvm" not in sys.modules
    print(f"apache-tvm-ffi {got}: {count} modules ran")
    return count


def install(folder: Path, requirement: str) -> None:
    if not (folder / "tvm_ffi").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
        subprocess.run(command, check=True)


def main() -> None:
    from tilewright.runtime.manifest import TVM_FFI_MIN

    pinned = next(
        line.strip().partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("apache-tvm-ffi==")
    )
    lowest = ".".join(map(str, TVM_FFI_MIN))
    for version in (lowest, pinned, ""):
        folder = FOLDER / (version or "newest")
        install(folder, f"apache-tvm-ffi=={version}" if version else "apache-tvm-ffi")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        subprocess.run([sys.executable, __file__, "child", version], check=True, env=environment)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        sys.exit(0 if child(sys.argv[2]) else "no modules are built: make build")
    main()
