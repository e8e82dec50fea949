# SPDX-License-Identifier: Apache-2.0
"""Plans of large runs: sizes of a model, a table of GPUs, memory and time of a layout, and the
search over layouts.

Everything here is arithmetic and the simulator of schedules: it needs neither torch nor a GPU.
"""
