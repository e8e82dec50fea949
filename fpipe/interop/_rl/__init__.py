# SPDX-License-Identifier: Apache-2.0
"""What an engine for reinforcement learning needs beside a pipeline; knows torch and fpipe, and no
trainer.
"""
