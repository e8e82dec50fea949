# SPDX-License-Identifier: Apache-2.0
"""One call of a pipeline: configuration, preparation, feeding, the loop over a plan, and results.

Nothing here knows the names of schedules or the kinds of backends.
"""
