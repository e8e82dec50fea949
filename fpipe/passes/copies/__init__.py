# SPDX-License-Identifier: Apache-2.0
"""Copies of a pipeline on other data (``dp=``): sums of gradients, tensors in parts (ZeRO)."""
