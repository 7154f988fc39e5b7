"""Print the marks of a short run: those of a plain one, without the longest tests."""

import re
from pathlib import Path

project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
found = re.search(r"-m '([^']*)'", project)
assert found is not None, "pyproject.toml names no marks in pytest's addopts"
print(f"{found[1]} and not long")
