"""The command line: ``fpipe draw``, ``compare``, ``train``, ``doctor`` and ``profile``, and ``fpipe.launch``."""
