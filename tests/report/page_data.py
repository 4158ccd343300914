"""The data in a page of `--report`."""

import base64
import json
import re
import zlib
from itertools import accumulate
from typing import Any


def data_of(text: str) -> dict[str, Any]:
    """The data of a page's script."""
    found = re.search(r'<script[^>]* id="data">([^<]*)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[1])))
    return data


def course_totals(course: dict[str, Any]) -> list[int]:
    """Live bytes at each step of a curve."""
    change = [0] * (len(course["name"]) + 1)
    for first, last, size in zip(course["first"], course["last"], course["bytes"], strict=True):
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change))[:-1]
