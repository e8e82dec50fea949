# SPDX-License-Identifier: Apache-2.0
"""Arguments and stages that only other processes have."""
