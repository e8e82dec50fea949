# SPDX-License-Identifier: Apache-2.0
"""Messages between processes of one host through memory that both map."""
