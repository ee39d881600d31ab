"""What pyproject.toml cannot say: run files and rule files lie at the top of the repository, and inside the installed
package."""
from setuptools import find_packages, setup

SHIPPED = {f"meshtrain.{path.replace('/', '.')}": path for path in ("configs", "configs/models", "configs/reverse", "sharding_rules")}

setup(packages=[*find_packages(include=["meshtrain*", "launch*"]), *SHIPPED], package_dir=SHIPPED,
      package_data={**dict.fromkeys(SHIPPED, ["*.toml", "*.jsonl.gz"]), "launch": ["*.sbatch", "*.yaml"],
                    "meshtrain": ["py.typed"], "meshtrain.pages": ["*.css", "*.js"]})
