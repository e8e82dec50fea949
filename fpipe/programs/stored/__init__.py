# SPDX-License-Identifier: Apache-2.0
"""Traces on disk: what identifies a function, programs as text, and a folder of such texts."""
