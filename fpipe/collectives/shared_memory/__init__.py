# SPDX-License-Identifier: Apache-2.0
"""Messages between processes of one host through memory that both map."""

#: The environment variable that, set to 0, leaves messages of one host to the backend.
SWITCH = "FPIPE_SHARED_MEMORY"
