"""What pyproject.toml cannot say: the wheel brings the native core, compiled, if there is a C compiler where it is built.

Without one the wheel is for every machine, and a node that has a compiler makes the core when it first needs it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).parent / "worker" / "tmd_worker" / "native"


def _building() -> ModuleType:
    """tmd_worker.native.building, without the packages around it, whose requirements are not installed here."""
    spec = importlib.util.spec_from_file_location("building", NATIVE / "building.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithCore(build_py):
    """Puts the compiled core beside its sources in what becomes the wheel."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # a source tree changes: there the core is compiled on first use
        building = _building()
        target = Path(self.build_lib) / "tmd_worker" / "native" / building.PACKAGED.name
        try:
            building.compile_to(target)
        except building.NotBuilt as reason:
            self.warn(f"the wheel comes without the native core: {reason}")


class WithCore(Distribution):
    """For this machine alone if it will carry the core."""

    def has_ext_modules(self) -> bool:
        building = _building()
        try:
            building.compiler()
        except building.NotBuilt:
            return False
        return True


class WheelOfThisMachine(bdist_wheel):
    """For any Python: the core is loaded through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine


setup(cmdclass={"build_py": BuildWithCore, "bdist_wheel": WheelOfThisMachine}, distclass=WithCore)
