# SPDX-License-Identifier: Apache-2.0
"""Copies of a pipeline on other data (``dp=``): gradients reduced, tensors cut into parts (ZeRO)."""
