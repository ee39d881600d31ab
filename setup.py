"""What pyproject.toml cannot say: run files, rule files, chat templates and launchers lie at the top of the repository,
and inside the installed package."""
from setuptools import find_packages, setup

SHIPPED = {f"meshtrain.{path.replace('/', '.')}": path
           for path in ("chat_templates", "configs", "configs/models", "configs/reverse", "sharding_rules")}

setup(packages=[*find_packages(include=["meshtrain*"]), *SHIPPED], package_dir=SHIPPED | {"meshtrain.launch": "launch"},
      package_data={**dict.fromkeys(SHIPPED, ["*.toml", "*.jinja", "*.jsonl.gz"]),
                    "meshtrain.launch": ["*.sbatch", "*.yaml"],
                    "meshtrain": ["py.typed"], "meshtrain.pages": ["*.css", "*.js"]})
