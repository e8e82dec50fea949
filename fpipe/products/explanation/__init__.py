# SPDX-License-Identifier: Apache-2.0
"""``pipe.explain``: one page: what runs where, messages, memory, idle time, advice.

Reads plans and simulates schedules; nothing runs.
"""

from .page import explain
from .reasons import advice, as_html, as_text

__all__ = ["advice", "as_html", "as_text", "explain"]
