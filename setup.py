"""What pyproject.toml cannot say: the wheel holds `yaml_configs` too, as `megavis/yaml_configs`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Copy the config files; an editable install finds them in the checkout."""

    def run(self) -> None:
        """Build the packages, then copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "megavis" / "yaml_configs"
            shutil.copytree("yaml_configs", target, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
