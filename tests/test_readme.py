"""The README's example of a head is real code."""

import re
from pathlib import Path

from lfc.testing import check_head

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
CODE = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "class OneCoin" in block)
namespace: dict = {"__name__": __name__}
exec(CODE, namespace)
OneCoin = namespace["OneCoin"]


def test_the_head_of_the_readme_keeps_the_contract():
    check_head(OneCoin)


def test_the_head_of_the_readme_is_as_short_as_it_says():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 22
