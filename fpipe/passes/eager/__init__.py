# SPDX-License-Identifier: Apache-2.0
"""Programs on autograd's own graph, for functions that cannot be traced: ``engine="eager"``."""
