# SPDX-License-Identifier: Apache-2.0
"""Messages between processes through TCP connections of their own, where they share no memory."""

#: The environment variable that, set to 0, leaves these messages to the backend.
SWITCH = "FPIPE_SOCKETS"
