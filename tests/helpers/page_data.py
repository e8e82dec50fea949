"""The data of a page that ``.html`` pictures are."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any


def page_data(text: str) -> dict[str, Any]:
    """The timelines in the text of a page."""
    data = text.split('id="data">')[1].split("</script>")[0]
    if not data.startswith("{"):
        data = zlib.decompress(base64.b64decode(data)).decode()
    return json.loads(data)
