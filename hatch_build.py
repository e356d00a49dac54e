"""Build hook: compiles the simulation loop with mypyc where ``HISPARSIM_COMPILE=1`` is set.

The modules stay what they are, and are installed beside their compiled form; results are the same bytes.
Without the variable, and in editable installs, a build is pure Python and needs no compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup

configuration, *modules = sys.argv[1:]
sys.argv[1:] = ["-q", "build", "--build-base", "build", "--build-lib", "lib"]
extensions = mypycify(["--config-file", configuration, *modules], opt_level="3", debug_level="0")
setup(name="hisparsim", packages=[], ext_modules=extensions)
"""


class CompileHook(BuildHookInterface):
    """The options ``modules`` and ``exclude`` say what is compiled, ``mypy-path`` where it imports from."""

    PLUGIN_NAME = "custom"

    _work: Path | None = None

    def _wanted(self) -> bool:
        return os.environ.get("HISPARSIM_COMPILE", "") not in ("", "0")

    def dependencies(self) -> list[str]:
        """Query: what a build needs besides hatchling; numpy for its types."""
        if not self._wanted():
            return []
        return ["mypy[mypyc]>=1.11", "setuptools>=70", "mypy-extensions>=1", "numpy>=1.26", "simpy>=4.1"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change: compile, and put what came out into the wheel."""
        if version == "editable" or not self._wanted():
            return
        root = Path(self.root)
        found = {path for pattern in self.config["modules"] for path in root.glob(pattern)}
        found -= {root / name for name in self.config["exclude"]}
        modules = sorted(str(path) for path in found if path.name != "__init__.py")
        work = self._work = Path(tempfile.mkdtemp(prefix="hisparsim-compile-"))
        setup = work / "setup.py"
        setup.write_text(SETUP, encoding="utf-8")
        # mypy's own settings only: setuptools would read the project's, which are hatchling's.
        configuration = work / "mypy.ini"
        paths = ":".join(str(root / folder) for folder in self.config["mypy-path"])
        configuration.write_text(
            f"[mypy]\nmypy_path = {paths}\nignore_missing_imports = True\nfollow_imports = silent\n",
            encoding="utf-8",
        )
        done = subprocess.run([sys.executable, str(setup), str(configuration), *modules], cwd=work)
        if done.returncode:
            shutil.rmtree(work, ignore_errors=True)
            raise SystemExit("error: the loop could not be compiled; unset HISPARSIM_COMPILE to do without")
        built = work / "lib"
        for library in built.rglob("*.*"):
            if library.suffix in (".so", ".pyd"):
                build_data["force_include"][str(library)] = str(library.relative_to(built))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Change: the wheel is written, the place of work can go."""
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
