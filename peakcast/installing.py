"""A step of installing peakcast; nothing else imports it."""

from __future__ import annotations

import compileall

from setuptools.command.build_py import build_py


class BuildPy(build_py):  # type: ignore[misc]
    """Byte-compiles the modules of an editable install, as installers do those of any other. Python would do it at the
    first import, where it may write beside them; where not (PYTHONDONTWRITEBYTECODE, a read-only folder), every start
    would compile two hundred modules anew."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            for package in self.packages or ():
                compileall.compile_dir(self.get_package_dir(package), maxlevels=0, quiet=1)
