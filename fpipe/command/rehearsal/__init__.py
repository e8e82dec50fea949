# SPDX-License-Identifier: Apache-2.0
"""``fpipe rehearse``: the model of a plan as pure stages without data, and the plans of its
ranks.
"""
