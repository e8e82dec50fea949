# SPDX-License-Identifier: Apache-2.0
"""One trace for all sizes of a signature. Loaded when a stage gets a second size."""
