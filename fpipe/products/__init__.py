# SPDX-License-Identifier: Apache-2.0
"""What is built on the library: pictures, search for schedules, plans of clusters, training, the
command line. The rest of fpipe works without this folder.
"""
