# SPDX-License-Identifier: Apache-2.0
"""The order in which the programs of one fused action run, so that communication overlaps with
compute.
"""
