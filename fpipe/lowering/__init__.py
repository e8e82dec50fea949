# SPDX-License-Identifier: Apache-2.0
"""From a schedule and programs to the instructions of one rank: values, messages, slots, memory.

Nothing here touches a tensor's data or knows a backend.
"""
