"""Write the lowest versions that `pyproject.toml` allows, as constraints for pip.

    python scripts/lowest_versions.py > constraints

What `constraints.txt` pins is left out: torch, of which a build is chosen there.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lowest(requirements: list[str]) -> dict[str, str]:
    """Lowest version by name, of those requirements that have one."""
    found = {}
    for requirement in requirements:
        name, floor = re.match(
            r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:[^;]*?>=([^,; ]+))?", requirement
        ).groups()
        if floor is not None:
            found[name] = floor
    return found


def main() -> None:
    """Write one line for each requirement of the package, its extras and its tests."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    groups += document["dependency-groups"].values()
    pinned = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    for group in groups:
        for name, version in lowest(group).items():
            if name not in pinned:
                sys.stdout.write(f"{name}=={version}\n")


if __name__ == "__main__":
    main()
