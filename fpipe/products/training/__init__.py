# SPDX-License-Identifier: Apache-2.0
"""Training runs: the loop, starting processes, elastic copies."""
