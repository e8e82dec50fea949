# SPDX-License-Identifier: Apache-2.0
"""Transforms beside the gradient: per-example gradients, and use inside torch.func."""
