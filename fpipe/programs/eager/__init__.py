# SPDX-License-Identifier: Apache-2.0
"""Programs that run on autograd's graph, for functions that cannot be traced."""
