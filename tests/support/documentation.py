"""The code blocks of the README and of the guide."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


README = (ROOT / "README.md").read_text()


GUIDE = (ROOT / "docs" / "observability.md").read_text()


PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README + GUIDE, re.DOTALL)


SHELL_BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
