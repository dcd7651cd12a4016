"""A step of peakcast's installation; no other module imports this one."""

from __future__ import annotations

import compileall

from setuptools.command.build_py import build_py


class BuildPy(build_py):  # type: ignore[misc]
    """Byte-compiles the modules of an editable install, as installers do for other installs. Otherwise Python compiles them
    at the first import, if it may write beside them; if not (PYTHONDONTWRITEBYTECODE, a read-only folder), every start
    would compile two hundred modules again."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            for package in self.packages or ():
                compileall.compile_dir(self.get_package_dir(package), maxlevels=0, quiet=1)
